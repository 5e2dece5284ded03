"""Which kernel takes a problem of an op, how it is laid out, and why. No GPU is needed.

    fuseline explain softmax --shape 64 1024 --gpu h200

Attention's choice among libraries is explained by fuseline.picker.explain."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import tyro

from fuseline.cli.precisions import TORCH_NAMES
from fuseline.errors import unknown_name
from fuseline.ops.plans import explain


@dataclass(frozen=True)
class Options:
    op: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OP")]
    """The op: softmax."""
    shape: tuple[int, ...]
    """Sizes of the input; the op runs over the last."""
    dtype: str = "bf16"
    """fp32, fp16 or bf16; torch's names serve, too."""
    gpu: str | None = None
    """The GPU: a100, l40s, h100, h200 or b200. Default: the one in this machine."""
    causal: bool = False
    """Row t sees the first t + 1 elements (of square scores)."""
    masked: bool = False
    """With a mask, dense and aligned."""
    scale: float = 1.0
    """The factor on the input."""
    json: bool = False
    """Print one JSON object."""


def run(options: Options) -> int:
    dtype = TORCH_NAMES.get(options.dtype, options.dtype)
    if dtype not in TORCH_NAMES.values():
        raise unknown_name("dtype", options.dtype, [*TORCH_NAMES, *TORCH_NAMES.values()])
    explained = explain(
        options.op,
        options.shape,
        getattr(torch, dtype),
        gpu=options.gpu,
        causal=options.causal,
        masked=options.masked,
        scale=options.scale,
    )
    if options.json:
        print(json.dumps({**asdict(explained), "dtype": dtype}))
    else:
        print(explained)
    return 0
