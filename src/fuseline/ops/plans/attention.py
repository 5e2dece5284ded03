"""Plans of our own attention kernels, over a cache too, and of small self-attention layers."""

from __future__ import annotations

import torch

from fuseline.errors import InputError, unknown_name
from fuseline.native.gpus import Gpu
from fuseline.ops.attention.problem import CAUSAL, Problem
from fuseline.ops.op import DTYPES
from fuseline.ops.plans.plan import Plan, launches, one_launch
from fuseline.ops.plans.problem import Rows


def attention(
    q: Rows,
    kv_heads: int = 0,
    keys: int = 0,
    causal: bool = False,
    window: int = -1,
    masked: bool = False,
    bias: bool = False,
    dropout: float = 0.0,
    sequences: bool = False,
) -> tuple[Plan, ...]:
    """Of `ops.attention`, forward and backward, with all gradients."""
    if len(q.shape) != 4:
        raise InputError(f"shape is {list(q.shape)}; attention takes the shape of q, [B, H, T, D].")
    if masked and bias:
        raise InputError("masked and bias are both given; attention has one mask.")
    (B, H, T, D), S = q.shape, keys or q.shape[2]
    if H % (kv_heads or H):
        raise InputError(f"kv_heads is {kv_heads}, which does not divide {H} heads.")
    problem = Problem(
        torch.device("cuda"),
        q.dtype,
        *(1 if sequences else B, H, kv_heads or H, T * B if sequences else T, S * B if sequences else S, D),
        causal="bottom_right" if causal else "none",
        window_left=window,
        mask="bool" if masked else "float_grad" if bias else "none",
        mask_dims="bs" if masked else "hts" if bias else "",
        sequences=B if sequences else 0,
        max_seqlen_q=T,
        max_seqlen_k=S,
        dropout_p=dropout,
    )
    return tuple(plan for work in ("forward", "backward") for plan in attention_plans(problem, q.gpu, work))


_MASKS = {"none": 0, "bool": 1, "float": 2, "float_grad": 2}


def attention_plans(problem: Problem, gpu: Gpu, work: str) -> tuple[Plan, ...]:
    """What our own kernels launch for whole tensors, forward or backward; the first names the reason and the
    workspace of all. `blocks` of kernels named `short_...` are problems: as many blocks as the GPU holds take
    them in turn. Where `sum_left` is the last, it and the one before come again until no rows are left."""
    p = problem
    sizes = [p.batch, p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim]
    kinds = [DTYPES.index(p.dtype), CAUSAL.index(p.causal), _MASKS[p.mask]]
    mask_dims = [p.mask != "none" and name in p.mask_dims for name in "bhts"]
    packed = [p.sequences, p.max_seqlen_q, p.max_seqlen_k]
    options = float(p.soft_cap), p.dropout_p, p.sinks, p.mask == "float_grad", work == "backward"
    planned = torch.ops.fuseline.plan_attention(
        gpu.numbers(), sizes, kinds, [p.window_left, p.window_right], mask_dims, packed, *options
    )
    return launches(work, *planned)


_CACHES = ("same", "int8", "fp8")


def decode_attention(q: Rows, kv_heads: int = 0, keys: int = 4096, cache: str = "same") -> tuple[Plan, ...]:
    """Of `ops.decode_attention`, over a cache of `keys` positions."""
    if len(q.shape) != 3:
        raise InputError(f"shape is {list(q.shape)}; decode_attention takes the shape of q, [B, H, D].")
    if cache not in _CACHES:
        raise unknown_name("cache", cache, _CACHES)
    (B, H, D), kinds = q.shape, (DTYPES.index(q.dtype), _CACHES.index(cache))
    sizes = [B, H, kv_heads or H, D, keys]
    return (
        one_launch(
            "forward", lambda _: torch.ops.fuseline.plan_decode_attention(q.gpu.numbers(), sizes, *kinds)
        ),
    )


def self_attention_layer(
    x: Rows,
    heads: int = 8,
    kv_heads: int = 0,
    head_dim: int = 0,
    out_dim: int = 0,
    shared: bool = False,
    tf32: bool = False,
    captured: bool = False,
) -> tuple[Plan, ...]:
    """Of the kernels of `implementation="fused"`, forward and backward, with all gradients."""
    if len(x.shape) != 3:
        raise InputError(f"shape is {list(x.shape)}; self_attention_layer takes the shape of x, [B, S, E].")
    if heads < 1 or heads % (kv_heads or heads):
        raise InputError(f"kv_heads is {kv_heads}, which does not divide {heads} heads.")
    B, S, E = x.shape
    sizes = [B, S, E, heads, kv_heads or heads, head_dim or E // heads, out_dim or E]
    given = x.gpu.numbers(), sizes, DTYPES.index(x.dtype), bool(tf32), bool(shared), bool(captured)

    def plans(work: str) -> tuple[Plan, ...]:
        return launches(work, *torch.ops.fuseline.plan_self_attention_layer(*given, work == "backward"))

    return plans("forward") + plans("backward")
