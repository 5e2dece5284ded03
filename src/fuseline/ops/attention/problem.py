"""What an attention call asks for, without its tensors: what candidates judge and the picker remembers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CAUSAL = ("none", "top_left", "bottom_right")


@dataclass(frozen=True)
class Problem:
    """One attention, hashable.

    batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim: q is [batch, heads, seqlen_q, head_dim], k and v
        [batch, kv_heads, seqlen_k, head_dim].
    direction: "fw", or "fwbw" where a gradient is wanted.
    causal, window_left, window_right: as in `Call`.
    mask: "none", "bool", "float", or "float_grad" for an additive mask that wants its gradient.
    mask_dims: those of "bhts" in which the mask is longer than 1.
    sequences: how many are packed (0: not packed), none longer than max_seqlen_q and max_seqlen_k.
    seeded: dropout follows a given seed, not torch's generator.
    lse: the logarithm of the sum is returned.
    deterministic: the same bits each time are asked for.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    direction: str = "fw"
    causal: str = "none"
    window_left: int = -1
    window_right: int = -1
    mask: str = "none"
    mask_dims: str = ""
    sequences: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    soft_cap: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    seeded: bool = False
    lse: bool = False
    deterministic: bool = False

    @property
    def is_square(self) -> bool:
        return self.seqlen_q == self.seqlen_k

    @property
    def is_windowed(self) -> bool:
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def is_simple(self) -> bool:
        """No window, packing, soft cap, sinks, seed or lse; a causal limit and a mask may be there."""
        return not (
            self.is_windowed or self.sequences or self.soft_cap or self.sinks or self.seeded or self.lse
        )

    @property
    def wants_grad(self) -> bool:
        return self.direction == "fwbw"

    @property
    def is_empty(self) -> bool:
        return 0 in (self.batch, self.heads, self.seqlen_q, self.seqlen_k, self.head_dim)

    def features(self) -> tuple[str, ...]:
        """What there is beyond q, k and v, in words."""
        found = []
        if self.causal != "none":
            found.append(f"causal ({self.causal.replace('_', ' ')})")
        if self.is_windowed:
            found.append(f"window ({self.window_left}, {self.window_right})")
        if self.mask != "none":
            kind = {"bool": "boolean", "float": "additive", "float_grad": "additive, trained"}[self.mask]
            found.append(f"{kind} mask over {self.mask_dims or 'nothing'}")
        if self.sequences:
            found.append(f"{self.sequences} packed sequences")
        if self.kv_heads != self.heads:
            found.append(f"{self.heads} heads over {self.kv_heads}")
        if self.soft_cap:
            found.append("soft cap")
        if self.sinks:
            found.append("sinks")
        if self.dropout_p:
            found.append(f"dropout {self.dropout_p:g}" + (" by a seed" if self.seeded else ""))
        if self.lse:
            found.append("lse returned")
        if self.deterministic:
            found.append("deterministic")
        return tuple(found)

    def __str__(self) -> str:
        shape = (
            f"B={self.batch} H={self.heads} T={self.seqlen_q} S={self.seqlen_k} D={self.head_dim} "
            f"{str(self.dtype).removeprefix('torch.')} {self.direction} on {self.device}"
        )
        return ", ".join((shape, *self.features()))
