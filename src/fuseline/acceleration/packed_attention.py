"""A whole layer of self-attention where torch's own code calls `F.multi_head_attention_forward`.

That function cuts the product of queries, keys and values apart by copies, and puts their gradients together
by more. Here attention reads the product as it lies and writes its gradient in one piece.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F

from fuseline.acceleration.rebound import StandIn
from fuseline.acceleration.shared_input import linear
from fuseline.acceleration.swap import NOT_PROVED, Key, why_not_tensors
from fuseline.ops import attention_packed
from fuseline.ops.autocast import autocast_on

torch_layer = F.multi_head_attention_forward
SIGNATURE = inspect.signature(torch_layer)
NOT_SELF = "queries, keys and values are not one tensor"


@dataclass(frozen=True)
class Form:
    """Of a call: heads, whether only torch's flag hides the future, dtype and dimensions of its mask, and the
    dtype of what marks padding."""

    heads: int
    causal: bool
    mask: tuple[torch.dtype, int] | None
    padding: torch.dtype | None


@dataclass(frozen=True)
class LayerCall:
    """One call. x: [B, T, E]; weights: of the packed product and of the output, each with its bias."""

    x: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]
    heads: int
    dropout: float
    causal: bool
    mask: torch.Tensor | None
    padding: torch.Tensor | None

    @classmethod
    def read(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> Self | str:
        """The call, from torch's arguments; why not, where it is none that Fuseline computes."""
        bound = SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        query, mask, padding = given["query"], given["attn_mask"], given["key_padding_mask"]
        if query is not given["key"] or query is not given["value"]:
            return NOT_SELF
        if given["need_weights"]:
            return "its weights are asked for"
        for name in ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn", "use_separate_proj_weight"):
            if given[name] is not None and given[name] is not False:
                return f"it is called with {name}"
        weights = tuple(given[f"{of}_proj_{what}"] for of in ("in", "out") for what in ("weight", "bias"))
        reason = why_not_tensors([t for t in (query, *weights, mask, padding) if t is not None])
        if reason is not None:
            return reason
        heads, p = given["num_heads"], given["dropout_p"] if given["training"] else 0.0
        if query.is_nested or query.dim() != 3 or query.shape[2] != given["embed_dim_to_check"]:
            return "its input is not one batch of sequences"
        T, B, _ = query.shape
        masks = (None, (T, T), (B * heads, T, T))
        fits = (None if mask is None else tuple(mask.shape)) in masks
        if not fits or (padding is not None and padding.shape != (B, T)) or not 0.0 <= p < 1.0:
            return "a mask or the dropout is none that torch documents"
        if any(one is not None and one.requires_grad for one in (mask, padding)):
            return "the mask has a gradient"
        if given["is_causal"] and mask is None:
            return "it is called as causal without a mask"
        causal = given["is_causal"] and padding is None
        return cls(_batch_first(query), weights, heads, p, causal, None if causal else mask, padding)

    @property
    def form(self) -> Form:
        mask = None if self.mask is None else (self.mask.dtype, self.mask.dim())
        return Form(self.heads, self.causal, mask, None if self.padding is None else self.padding.dtype)

    def key(self, *, lengths: bool) -> Key:
        """What a proof is for; with its `lengths` where it is tied to them."""
        device = self.x.device.type
        autocast = autocast_on(device)
        shapes = tuple(None if t is None else (t.dtype, t.device.type, tuple(t.shape)) for t in self.weights)
        drops = self.dropout > 0
        return device, autocast, self.x.dtype, shapes, self.form, drops, self.x.shape if lengths else None

    def run(self, seed: torch.Tensor | None = None) -> torch.Tensor:
        """[B, T, E] by Fuseline's ops."""
        in_weight, in_bias, out_weight, out_bias = self.weights
        packed = linear(self.x, in_weight, in_bias, leaves=False)
        mask = self.merged(packed.dtype)
        causal = "top_left" if self.causal else False
        out = attention_packed(
            packed, self.heads, causal=causal, mask=mask, dropout_p=self.dropout, seed=seed
        )
        return linear(out, out_weight, out_bias, leaves=False)

    def merged(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Both masks as one of four dimensions that is added to the scores, as torch merges them."""
        mask, padding = (None if m is None else _added(m, dtype) for m in (self.mask, self.padding))
        if mask is not None:
            T = mask.shape[-1]
            mask = mask[None, None] if mask.dim() == 2 else mask.view(-1, self.heads, T, T)
        if padding is None:
            return mask
        padding = padding[:, None, None]
        return padding if mask is None else mask + padding


class PackedAttention(StandIn):
    """Stands in for `F.multi_head_attention_forward` in the forward of torch's module, which turns what it
    returns, [T, B, E], into batches of sequences again."""

    def __init__(self, keys: Sequence[Key], strict: bool = False) -> None:
        super().__init__(strict)
        self.keys = set(keys)

    def merge(self, other: StandIn) -> bool:
        if not isinstance(other, PackedAttention):
            return False
        self.keys |= other.keys
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = LayerCall.read(args, kwargs)
        if isinstance(call, str):
            reason = call
        elif not self.keys.isdisjoint((call.key(lengths=False), call.key(lengths=True))):
            self.taken += 1
            out = call.run().transpose(0, 1)
            query = args[0] if args else kwargs["query"]
            return out.contiguous() if query.is_contiguous() else out, None  # as torch's lies
        else:
            reason = NOT_PROVED
        self.decline(reason)
        return self.original(*args, **kwargs)


def _batch_first(query: torch.Tensor) -> torch.Tensor:
    """[T, B, E] as [B, T, E]: the very tensor that it was turned from, where it is such a view. Others who
    read that tensor are then seen to read the same."""
    x = query.transpose(0, 1)
    base, node = query._base, query.grad_fn
    if base is None or node is None or base.grad_fn is None or node.name() != "TransposeBackward0":
        return x
    same = base.shape == x.shape and base.stride() == x.stride() and base.data_ptr() == x.data_ptr()
    return base if same and node.next_functions[0] == (base.grad_fn, base.output_nr) else x


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What torch adds to the scores: of a mask of truth values -inf where it is True."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)
