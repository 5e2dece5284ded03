"""Which kernel takes a problem of an op, how it is laid out, and why. No GPU is needed.

For example: fuseline explain softmax --shape 64 1024 --gpu h200.
Attention's choice among libraries is explained by fuseline.picker.explain."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Annotated

import torch
import tyro

from fuseline.cli.precisions import TORCH_NAMES
from fuseline.errors import unknown_name
from fuseline.ops.plans import explain


@dataclass(frozen=True)
class Options:
    op: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OP")]
    """The op: softmax, cross_entropy, gelu, swiglu, geglu, embedding or quant_linear."""
    shape: tuple[int, ...]
    """Sizes of the input; the op runs over the last. Of embedding: of the output."""
    dtype: str = "bf16"
    """fp32, fp16 or bf16; torch's names serve, too."""
    gpu: str | None = None
    """The GPU: a100, l40s, h100, h200 or b200. Default: the one in this machine."""
    address: int = 0
    """Of the tensors, modulo 128 bytes: 0 for whole tensors."""
    causal: bool = False
    """Of softmax: row t sees the first t + 1 elements (of square scores)."""
    masked: bool = False
    """Of softmax: with a mask, dense and aligned."""
    scale: float = 1.0
    """Of softmax: the factor on the input."""
    weight: bool = False
    """Of cross_entropy: with class weights."""
    label_smoothing: float = 0.0
    """Of cross_entropy."""
    soft_cap: float = 0.0
    """Of cross_entropy: the bound of the logits."""
    bias: bool = False
    """Of gelu: with a bias, and its gradient."""
    halves: bool = False
    """Of swiglu and geglu: gate and up are halves of the last size."""
    rows: int = 50257
    """Of embedding: rows of the table."""
    positions: bool = False
    """Of embedding: with a table of positions."""
    out_features: int = 4096
    """Of quant_linear: rows of the weight."""
    format: str = "int8"
    """Of quant_linear: plain, int8 or int4."""
    group_size: int = 128
    """Of quant_linear in int4: columns that share a scale."""
    zero_points: bool = False
    """Of quant_linear in int4: with zero points."""
    json: bool = False
    """Print one JSON object."""


_SHARED = {"op", "shape", "dtype", "gpu", "address", "json"}


def run(options: Options) -> int:
    dtype = TORCH_NAMES.get(options.dtype, options.dtype)
    if dtype not in TORCH_NAMES.values():
        raise unknown_name("dtype", options.dtype, [*TORCH_NAMES, *TORCH_NAMES.values()])
    own = [field for field in fields(options) if field.name not in _SHARED]
    given = {f.name: getattr(options, f.name) for f in own if getattr(options, f.name) != f.default}
    explained = explain(
        options.op, options.shape, getattr(torch, dtype), gpu=options.gpu, address=options.address, **given
    )
    if options.json:
        print(json.dumps({**asdict(explained), "dtype": dtype}))
    else:
        print(explained)
    return 0
