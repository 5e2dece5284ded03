"""The layers that `bench attention --suite small` compares, each over the same weights.

Forms: `shared`, in which the heads share one projection of [3 D, D] (`fuseline.nn.SelfAttention`);
`full`, with rows of the projection for each head, as `torch.nn.MultiheadAttention` has it; and `block`, a
transformer block around the latter (`fuseline.nn.TransformerEncoderLayer`): y = x + attention(norm(x)),
y + W_2 gelu(W_1 norm(y)), W_1 of 4 E rows; and `bar`, which is `full` at the sizes that the layer was
made for, beside the module over torch's attention alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from fuseline.nn import SelfAttention, TransformerEncoderLayer
from fuseline.ops import self_attention_layer

PEERS = {
    "shared": ("python", "aten", "fuseline", "sdpa"),
    "full": ("python", "aten", "fuseline", "sdpa", "mha"),
    "block": ("python", "fuseline", "sdpa", "eager"),
    "bar": ("fuseline", "sdpa", "mha", "inductor", "max-autotune"),
}
"""The peers of each form. `sdpa`: the module over torch's attention, which `inductor` and `max-autotune`
compile; `mha` and `eager`: torch's own MultiheadAttention and TransformerEncoderLayer, in evaluation, where
a forward without gradients takes torch's fast path."""

MODES = {"inductor": None, "max-autotune": "max-autotune-no-cudagraphs"}

IMPLEMENTATIONS = {"python": "python", "aten": "aten", "fuseline": "fused"}


@dataclass(frozen=True)
class Layer:
    """A layer as it is called, and the weights that it has gradients for."""

    run: Callable[[torch.Tensor], torch.Tensor]
    leaves: tuple[torch.Tensor, ...]


def build(
    form: str, peer: str, embed_dim: int, heads: int, device: torch.device, dtype: torch.dtype, seed: int
) -> Layer:
    """`peer`'s layer of that form; the same weights for the same seed."""
    if form == "shared":
        return _shared(peer, embed_dim, heads, device, dtype, seed)
    torch.manual_seed(seed)
    if form == "block":
        return _block(peer, embed_dim, heads, device, dtype)
    theirs = torch.nn.MultiheadAttention(embed_dim, heads, batch_first=True, device=device, dtype=dtype)
    theirs.eval()
    if peer == "mha":
        return Layer(lambda x: theirs(x, x, x, need_weights=False)[0], tuple(theirs.parameters()))
    qkv_weight, qkv_bias = theirs.in_proj_weight, theirs.in_proj_bias
    last = theirs.out_proj.weight, theirs.out_proj.bias
    if peer in ("aten", "fuseline"):
        implementation = IMPLEMENTATIONS[peer]

        def run(x: torch.Tensor) -> torch.Tensor:
            return self_attention_layer(
                x, qkv_weight, qkv_bias, *last, num_heads=heads, implementation=implementation
            )
    else:

        def run(x: torch.Tensor) -> torch.Tensor:
            attend = "sdpa" if peer in MODES else peer
            return _composed(attend, x, qkv_weight, qkv_bias, *last, heads)

    if peer in MODES:
        run = torch.compile(run, dynamic=False, fullgraph=True, mode=MODES[peer])
    return Layer(run, (qkv_weight, qkv_bias, *last))


def _shared(
    peer: str, embed_dim: int, heads: int, device: torch.device, dtype: torch.dtype, seed: int
) -> Layer:
    torch.manual_seed(seed)
    implementation = IMPLEMENTATIONS.get(peer, "python")
    module = SelfAttention(embed_dim, heads, implementation=implementation, device=device, dtype=dtype)
    if peer != "sdpa":
        return Layer(module, tuple(module.parameters()))

    def run(x: torch.Tensor) -> torch.Tensor:
        B, S, E = x.shape
        packed = F.linear(x.view(B, S, heads, E // heads), module.qkv_weight)
        q, k, v = packed.transpose(1, 2).chunk(3, dim=-1)
        attended = _sdpa(q, k, v, 1.0 / math.sqrt(E))
        return F.linear(attended.transpose(1, 2).reshape(B, S, E), module.out_weight, module.out_bias)

    return Layer(run, tuple(module.parameters()))


def _block(peer: str, embed_dim: int, heads: int, device: torch.device, dtype: torch.dtype) -> Layer:
    options: dict[str, Any] = {"batch_first": True, "norm_first": True, "device": device, "dtype": dtype}
    kind = TransformerEncoderLayer if peer == "fuseline" else torch.nn.TransformerEncoderLayer
    module = kind(embed_dim, heads, 4 * embed_dim, 0.0, "gelu", **options).eval()
    leaves = tuple(module.parameters())
    if peer in ("fuseline", "eager"):
        return Layer(module, leaves)
    attention = module.self_attn
    last = attention.out_proj.weight, attention.out_proj.bias

    def run(x: torch.Tensor) -> torch.Tensor:
        total = x + _composed(
            peer, module.norm1(x), attention.in_proj_weight, attention.in_proj_bias, *last, heads
        )
        return total + module.linear2(F.gelu(module.linear1(module.norm2(total))))

    return Layer(run, leaves)


def _composed(
    peer: str,
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    attend = _sdpa if peer == "sdpa" else _formula
    B, S, E = x.shape
    packed = F.linear(x, qkv_weight, qkv_bias).view(B, S, 3, heads, E // heads)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    attended = attend(q, k, v, 1.0 / math.sqrt(E // heads))
    return F.linear(attended.transpose(1, 2).reshape(B, S, E), out_weight, out_bias)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def _formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * scale, dim=-1) @ v
