"""Torch's attention function called by a model's own code, by Fuseline's in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fuseline import ops
from fuseline.acceleration.attention import AttentionCall
from fuseline.acceleration.rebound import StandIn
from fuseline.acceleration.swap import NOT_PROVED, Key, why_not_tensors

torch_attention = F.scaled_dot_product_attention


@dataclass
class InlineCall(AttentionCall):
    """One call of `scaled_dot_product_attention`; its results are [B, H, T, D]."""

    def by_torch(self) -> torch.Tensor:
        return torch_attention(
            self.query,
            self.key,
            self.value,
            attn_mask=self.mask,
            dropout_p=self.dropout,
            is_causal=self.hides_future,
            scale=self.scaling,
            **self.others,
        )

    def by_fuseline(self, seed: torch.Tensor | None = None) -> torch.Tensor:
        return ops.attention(
            self.query,
            self.key,
            self.value,
            causal="top_left" if self.hides_future else False,
            mask=self.mask,
            softmax_scale=self.scaling,
            dropout_p=self.dropout,
            seed=seed,
        )

    def laid_out(self, out: torch.Tensor) -> torch.Tensor:
        return out

    @property
    def causal(self) -> bool:
        return bool(self.is_causal)

    @property
    def hides_future(self) -> bool:
        return self.causal and self.mask is None

    def why_not(self) -> str | None:
        if self.query.dim() != 4 or self.key.dim() != 4 or self.value.dim() != 4:
            return "its queries, keys or values do not have four dimensions"
        if self.causal and self.mask is not None:
            return "it is called with a mask and as causal"
        if self.key.shape[1] not in (1, self.query.shape[1]) and not self.others.get("enable_gqa"):
            return "queries and keys have different heads"
        return super().why_not()


def inline_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> InlineCall:
    """The call, from torch's arguments."""
    others: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
    return InlineCall(module, query, key, value, attn_mask, dropout_p, scale, is_causal, others)


class InlineAttention(StandIn):
    """Stands in for `scaled_dot_product_attention` in one module's forward."""

    def __init__(self, module: nn.Module, keys: Sequence[Key], strict: bool = False) -> None:
        super().__init__(strict)
        self.module, self.keys = module, set(keys)

    def merge(self, other: StandIn) -> bool:
        if not isinstance(other, InlineAttention):
            return False
        self.keys |= other.keys
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = inline_call(self.module, *args, **kwargs)
        reason = why_not_tensors(call.tensors()) or call.why_not()
        if reason is None and call.key_of_proof() not in self.keys:
            reason = NOT_PROVED
        if reason is not None:
            self.decline(reason)
            return self.original(*args, **kwargs)
        self.taken += 1
        return call.by_fuseline()
