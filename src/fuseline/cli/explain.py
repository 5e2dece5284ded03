"""Say which kernel computes an op for a shape, how its threads are laid out, and why. Needs no GPU.

For example: fuseline explain softmax --shape 64 1024 --gpu h200.
In Python, fuseline.picker.explain says whether attention goes to these kernels or another library's."""

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
    """The op: softmax, cross_entropy, gelu, swiglu, geglu, embedding, quant_linear, layer_norm, rms_norm, or
    a norm behind add_ or dropout_add_, such as add_rms_norm; attention, decode_attention,
    self_attention_layer, decode_step, argmax_step; of the optimizer's step, adamw and gradient_norm."""
    shape: tuple[int, ...]
    """Sizes of the input, of embedding those of the output. The op runs over the last dimension. Of
    attention: sequences, heads, queries and head dim of q; of decode_attention without queries. Of
    self_attention_layer: sequences, tokens and width; of decode_step: 1 and the width; of argmax_step:
    sequences and vocabulary. Of adamw and gradient_norm: the sizes of one parameter."""
    dtype: str = "bf16"
    """fp32, fp16 or bf16, or torch's names of these."""
    gpu: str | None = None
    """The GPU: a100, l40s, h100, h200 or b200. Default: the one in this machine."""
    address: int = 0
    """The tensors' address modulo 128 bytes; 0 for tensors as torch allocates them."""
    causal: bool = False
    """softmax: row t sees the first t + 1 elements (of square scores). attention: the last query sees all
    keys, each before it one fewer."""
    masked: bool = False
    """softmax: there is a mask, dense and aligned. attention: a boolean one of keys."""
    scale: float = 1.0
    """softmax: the factor on the input."""
    weight: bool = False
    """cross_entropy: there are class weights."""
    label_smoothing: float = 0.0
    """cross_entropy: the label smoothing."""
    soft_cap: float = 0.0
    """cross_entropy: the bound of the logits; 0 for none."""
    bias: bool = False
    """gelu: there is a bias, and its gradient is computed. attention: it is added to each head's scores."""
    halves: bool = False
    """Of swiglu and geglu: gate and up are halves of the last size."""
    rows: int = 50257
    """embedding: rows of the table."""
    positions: bool = False
    """embedding: there is a table of positions."""
    out_features: int = 4096
    """quant_linear: rows of the weight."""
    format: str = "int8"
    """quant_linear: plain, int8 or int4."""
    group_size: int = 128
    """quant_linear in int4: columns that share a scale."""
    zero_points: bool = False
    """quant_linear in int4: there are zero points."""
    direction: str | None = None
    """Of norms: forward or backward. Default: both."""
    fp32_stream: bool = False
    """Of norms: what is normalized is float32, as under autocast; --dtype is that of the result."""
    fp32_weights: bool = False
    """Of norms: weight and bias are float32."""
    x_bias: bool = False
    """Of norms behind dropout_add_: the branch has a bias."""
    heads: int = 0
    """self_attention_layer and decode_step: heads of queries. Default: 8 for the layer, 12 for the step."""
    kv_heads: int = 0
    """attention, self_attention_layer, decode_step: heads of keys and values. Default: as many as heads of
    queries."""
    head_dim: int = 0
    """self_attention_layer and decode_step: elements of a head. Default: width / heads for the layer, 64 for
    the step."""
    out_dim: int = 0
    """self_attention_layer: width of the result. Default: the width of the input."""
    shared: bool = False
    """self_attention_layer: one projection for all heads."""
    tf32: bool = False
    """self_attention_layer in fp32: compute products in TF32."""
    captured: bool = False
    """self_attention_layer: the call is captured in a CUDA graph."""
    layers: int = 12
    """decode_step: layers of the model."""
    ffn_dim: int = 0
    """decode_step: width inside the MLP. Default: four times the width."""
    vocab_size: int = 50257
    """decode_step: rows of the head's weight."""
    swiglu: bool = False
    """decode_step: the MLP is gated by SwiGLU."""
    keys: int = 0
    """attention: keys of a sequence. Default: as many as queries; of decode_attention 4096."""
    window: int = -1
    """attention: a query sees so many keys to its left. Default: all."""
    dropout: float = 0.0
    """attention: the probability that dropout drops."""
    sequences: bool = False
    """attention: the sequences are packed, one behind the other."""
    cache: str = "same"
    """decode_attention: the cache's numbers: same, int8 or fp8."""
    tensors: int = 1
    """adamw and gradient_norm: how many parameters of that shape there are."""
    json: bool = False
    """Print one JSON object."""


_OTHERS = (
    "These are Fuseline's own kernels. ops.attention takes another library's kernel where that was faster: "
    "fuseline.picker.explain(q, k, v) in Python says which one, and why."
)
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
        return 0
    print(explained)
    if options.op == "attention":
        print(_OTHERS)
    return 0
