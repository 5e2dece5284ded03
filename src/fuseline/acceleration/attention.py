"""Attention of `transformers` models, through that library's own tables of attention functions.

A model asks `AttentionInterface` for the function of its configuration's name, and `AttentionMaskInterface`
for the function that makes masks for it. Fuseline stands in both under the name `fuseline`: masks are made as
for torch's `scaled_dot_product_attention`, so no padding is lost. A module that was proved runs
`fuseline.ops.attention`; any other, and any call unlike the proved ones, runs what it did before.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from fuseline import ops
from fuseline.ops.autocast import autocast_on

NAME = "fuseline"
REPLACED = "sdpa"
MARK = "_fuseline_attention"
"""The attribute of a module whose attention was proved."""


@dataclass
class AttentionCall:
    """One call of a model's attention function, in the words of `transformers`."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    scaling: float | None
    is_causal: bool | None
    others: dict[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        bias = self.others.get("position_bias")
        given = [self.query, self.key, self.value, self.mask, bias]
        return [t for t in given if t is not None]

    def with_tensors(self, tensors: list[torch.Tensor]) -> Self:
        """The same call with other tensors, in the order of `tensors`."""
        rest = list(tensors[3:])
        mask = rest.pop(0) if self.mask is not None else None
        others = dict(self.others)
        if others.get("position_bias") is not None:
            others["position_bias"] = rest.pop(0)
        q, k, v = tensors[:3]
        return replace(self, query=q, key=k, value=v, mask=mask, others=others)

    def without_dropout(self) -> Self:
        return replace(self, dropout=0.0)

    def by_torch(self) -> torch.Tensor:
        """What the model ran before."""
        result: torch.Tensor = _torch_attention()(
            self.module,
            self.query,
            self.key,
            self.value,
            self.mask,
            dropout=self.dropout,
            scaling=self.scaling,
            is_causal=self.is_causal,
            **self.others,
        )[0]
        return result

    def by_fuseline(self, seed: torch.Tensor | None = None) -> torch.Tensor:
        """The same by `fuseline.ops.attention`: [B, T, H, D], in one piece."""
        q, k, v, mask = self.query, self.key, self.value, self.mask
        length = q.shape[2]
        causal = self.hides_future
        bias = self.others.get("position_bias")
        if causal and k.shape[2] > length:
            # The library's own words: the keys beyond are those of an empty cache.
            k, v = k[:, :, :length], v[:, :, :length]
            bias = None if bias is None else bias[..., :length]
        if bias is not None:
            mask, causal = _biased(bias, mask, causal, q, k), False
        out = ops.attention(
            q,
            k,
            v,
            causal="top_left" if causal else False,
            mask=mask,
            softmax_scale=self.scaling,
            dropout_p=self.dropout,
            seed=seed,
        )
        return self.laid_out(out)

    def laid_out(self, out: torch.Tensor) -> torch.Tensor:
        """[B, H, T, D] as the model's function returns it."""
        return out.transpose(1, 2).contiguous()

    @property
    def causal(self) -> bool:
        return bool(getattr(self.module, "is_causal", True) if self.is_causal is None else self.is_causal)

    @property
    def hides_future(self) -> bool:
        """Whether query t sees no key after t, though no mask says so."""
        return bool(self.causal and self.query.shape[2] > 1 and self.mask is None)

    def key_of_proof(self) -> tuple[Any, ...]:
        """What a proof is for."""
        device = self.query.device.type
        autocast = autocast_on(device)
        bias = self.others.get("position_bias")
        return (
            device,
            autocast,
            self.query.dtype,
            self.query.shape[1],
            self.key.shape[1],
            self.query.shape[-1],
            None if self.mask is None else (self.mask.dtype, self.mask.dim()),
            None if bias is None else bias.dtype,
            self.scaling,
            self.causal,
        )

    def why_not(self) -> str | None:
        """What Fuseline's attention does not do, or does not know."""
        known = {"position_bias", "sliding_window", "cache", "softcap", "output_attentions"}
        for name in self.others.keys() & {"cache", "softcap"}:
            if self.others[name] is not None:
                return f"it is called with {name}"
        if self.others.get("output_attentions"):
            return "its weights are asked for"
        strange = [
            name
            for name, value in self.others.items()
            if name not in known and isinstance(value, torch.Tensor) and value.requires_grad
        ]
        if strange:
            return f"it is called with {strange[0]}"
        if self.query.dim() != 4 or self.key.shape[-1] != self.value.shape[-1]:
            return "its keys and values have different sizes"
        if self.query.shape[0] != self.key.shape[0]:
            return "queries and keys have different batches"
        if any(type(t) not in (torch.Tensor, nn.Parameter) for t in self.tensors()):
            return "an input is a tensor of another kind"
        return None


@dataclass
class AttentionMark:
    """Stands on a module whose attention was proved, for the calls of these keys."""

    keys: set[tuple[Any, ...]] = field(default_factory=set)
    strict: bool = False
    taken: int = 0
    declined: Counter[str] = field(default_factory=Counter)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Back from a file, where the library's tables do not know the name yet."""
        self.__dict__.update(state)
        register()


_recording: list[AttentionCall] | None = None
"""Calls seen, while `recorded` looks."""


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What stands in `AttentionInterface` under the name `fuseline`."""
    call = AttentionCall(module, query, key, value, attention_mask, dropout, scaling, is_causal, others)
    if _recording is not None:
        held = [t.detach().requires_grad_(t.requires_grad) for t in call.tensors()]
        _recording.append(call.with_tensors(held))
        return call.by_torch(), None
    mark = module.__dict__.get(MARK)
    if mark is None:
        return call.by_torch(), None
    reason = call.why_not()
    if reason is None and call.key_of_proof() not in mark.keys:
        reason = "it was not proved for these dtypes, heads or masks"
    if reason is not None:
        if mark.strict:
            raise RuntimeError(
                f"{type(module).__name__} runs torch's attention, not Fuseline's: {reason}. This raises "
                "because the model was accelerated with strict=True."
            )
        if not is_dynamo_compiling():
            mark.declined[reason] += 1
        return call.by_torch(), None
    if not is_dynamo_compiling():
        mark.taken += 1
    return call.by_fuseline(), None


def register() -> None:
    """Put Fuseline's name into the tables of `transformers`, which must be there."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def configurations(model: nn.Module) -> list[Any]:
    """The configurations inside a model that ask for torch's attention, each once.

    Empty where `transformers` was not even imported, or knows no such tables.
    """
    library = sys.modules.get("transformers")
    if library is None or not hasattr(library, "AttentionMaskInterface"):
        return []
    seen: dict[int, Any] = {}
    waiting = [module.__dict__.get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in seen or not hasattr(config, "_attn_implementation_internal"):
            continue
        seen[id(config)] = config
        waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [c for c in seen.values() if c._attn_implementation_internal == REPLACED]


def runs_ours(config: Any) -> bool:
    """Whether models of a configuration ask for Fuseline's attention."""
    return bool(config._attn_implementation_internal == NAME)


def rename(configs: list[Any], name: str) -> None:
    for config in configs:
        config._attn_implementation_internal = name


@contextmanager
def recorded(configs: list[Any]) -> Iterator[list[AttentionCall]]:
    """Within, models of these configurations run torch's attention, and their calls are written down."""
    global _recording
    register()
    rename(configs, NAME)
    _recording = []
    try:
        yield _recording
    finally:
        _recording = None
        rename(configs, REPLACED)


def _torch_attention() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[REPLACED]


def _biased(
    bias: torch.Tensor, mask: torch.Tensor | None, causal: bool, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """The library's own mask of a learned bias, with what the mask hides at the dtype's lowest number."""
    from transformers.integrations.sdpa_attention import create_position_bias_mask

    combined: torch.Tensor = create_position_bias_mask(bias, mask, causal, q, k)
    return combined
