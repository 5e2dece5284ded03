"""What attention reads: one packed product of queries, keys and values, and how it is to be read.

A model hands both to an `Attend`, and gets back what its heads gathered. Over a whole sequence that is
`whole_sequence`; with a cache of earlier keys and values it is the cache's (`fuseline.generation`), which may
do all of it in one kernel. So a model is written once for training, for prompts and for tokens one by one.

Shapes: B batch, T time, H query heads, K key heads, D head_dim, N = (H + 2 K) * D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseline import ops
from fuseline.ops.rms_norm import reference as plain_rms_norm
from fuseline.ops.rope import reference as plain_rope
from fuseline.ops.rope import rope_pair


@dataclass(frozen=True)
class Heads:
    """How [B, T, N] is read: H query heads side by side, then K key heads, then K value heads.

    `cos`, `sin`: tables [positions, D / 2] of rotary angles (half-split), or None. `q_norm`, `k_norm`: [D],
    weights of an RMSNorm over each head before it is turned, or None. `window`: a position sees so many
    positions, itself among them. `fused` says whether Fuseline's ops may compute.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos: Tensor | None = None
    sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    window: int | None = None
    fused: bool = True

    def split(self, qkv_BTN: Tensor, positions_BT: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, D], k and v [B, K, T, D], normed and turned by their positions (0, 1, .. if absent)."""
        B, T, _ = qkv_BTN.shape
        H, K, D = self.num_heads, self.num_kv_heads, self.head_dim
        heads_BTHD = qkv_BTN.view(B, T, H + 2 * K, D)
        q_BHTD, k_BHTD, v_BHTD = heads_BTHD.transpose(1, 2).split([H, K, K], dim=1)
        q_BHTD, k_BHTD = self._normed(q_BHTD, self.q_norm), self._normed(k_BHTD, self.k_norm)
        return *self._turned(q_BHTD, k_BHTD, positions_BT), v_BHTD

    def _normed(self, x_BHTD: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x_BHTD
        norm = ops.rms_norm if self.fused else plain_rms_norm
        return norm(x_BHTD, weight, self.eps)

    def _turned(self, q_BHTD: Tensor, k_BHTD: Tensor, positions_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.cos is None:
            return q_BHTD, k_BHTD
        if self.fused:
            return rope_pair(q_BHTD, k_BHTD, self.cos, self.sin, positions=positions_BT)
        one, other = (plain_rope(x, self.cos, self.sin, positions=positions_BT) for x in (q_BHTD, k_BHTD))
        return one, other


Attend = Callable[[int, Tensor, Heads], Tensor]
"""`attend(layer, qkv_BTN, heads)` gives what the heads of that layer gathered, [B, T, H * D]."""


def whole_sequence(layer: int, qkv_BTN: Tensor, heads: Heads) -> Tensor:
    """The `Attend` of a sequence that begins at position 0."""
    return merged(causal(*heads.split(qkv_BTN), heads.window, fused=heads.fused))


def causal(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: int | None = None, *, fused: bool = True
) -> Tensor:
    """Attention of a sequence over itself, [B, H, T, D]; over its last `window` positions if that is said. By
    the kernel that is picked, or where Fuseline's ops may not compute by torch's choice."""
    T = q_BHTD.shape[2]
    if window is not None and window >= T:
        window = None
    if fused:
        before = None if window is None else (window - 1, 0)
        return ops.attention(q_BHTD, k_BHTD, v_BHTD, causal=True, window=before)
    if window is None:
        return scaled_dot_product(q_BHTD, k_BHTD, v_BHTD, None, causal=True)
    places_T = torch.arange(T, device=q_BHTD.device)
    ages_TS = places_T[:, None] - places_T
    return scaled_dot_product(q_BHTD, k_BHTD, v_BHTD, (ages_TS >= 0) & (ages_TS < window))


def scaled_dot_product(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, keep: Tensor | None, *, causal: bool = False
) -> Tensor:
    """torch's attention, [B, H, T, D]; heads in a row share keys where there are fewer of these."""
    shared = q_BHTD.shape[1] != k_BHSD.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTD, k_BHSD, v_BHSD, attn_mask=keep, is_causal=causal, enable_gqa=shared
    )


def merged(y_BHTD: Tensor) -> Tensor:
    """[B, T, H * D]: the heads of each position side by side."""
    return y_BHTD.transpose(1, 2).flatten(2)
