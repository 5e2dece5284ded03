"""The memory that a generation will want, known from the sizes of the model alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuseline.errors import InputError
from fuseline.generation.decoder import PROMPT_TOKENS
from fuseline.generation.static_cache import CacheShape
from fuseline.models.gpt_config import GPTConfig
from fuseline.models.llama_config import LlamaConfig
from fuseline.ops.quant_codes import CODES
from fuseline.timing.memory import available

# A weight of a linear layer, scales among it: one of int8 and fp8 a row, one bf16 a group.
_LINEAR_BYTES = {
    "int8": 1.0,
    "fp8": 1.0,
    "w8a8": 1.0,
    **{name: codes.bits_per_weight / 8 for name, codes in CODES.items()},
}
HEAD_IN_INT8 = ("int8", "int4", "w8a8", *CODES)
"""Formats beside which the head is in int8."""
GIB = 2**30


@dataclass(frozen=True)
class Footprint:
    """Bytes of the weights as they are kept, of the cache, of a prompt on its way through the model; and of
    the weights before they are quantized, which must be there as well for a moment."""

    weights: int
    cache: int
    prompt: int
    before: int = 0

    @property
    def total(self) -> int:
        return max(self.weights + self.cache + self.prompt, self.before)


def linear_bytes(weights: int, format: str | None, itemsize: int, group_size: int = 128) -> int:
    """Bytes of `weights` weights of linear layers."""
    if format == "int4":
        return int(weights * (0.5 + 2 / group_size))
    return int(weights * _LINEAR_BYTES.get(format or "", float(itemsize)))


def footprint(
    config: GPTConfig | LlamaConfig,
    *,
    batch: int,
    prompt: int,
    capacity: int,
    dtype: torch.dtype,
    format: str | None = None,
    group_size: int = 128,
    storage: str = "model",
    ready: bool = False,
) -> Footprint:
    """What a model of that config takes with its linear layers in `format` (None: as they are), for `batch`
    prompts of up to `prompt` tokens and rows of `capacity` positions. `ready`: they are in that format on
    disk already."""
    C, L, V = config.embed_dim, config.num_layers, config.vocab_size
    if isinstance(config, GPTConfig):
        inner, linears, tables = 4 * C, 12 * C * C * L, (config.padded_vocab_size + config.block_size) * C
        head, widest = 0, 4 * C
    else:
        D, F = config.head_dim, config.ffn_dim
        qkv = (config.num_heads + 2 * config.num_kv_heads) * D
        inner, linears = 2 * F, L * (C * qkv + config.num_heads * D * C + 3 * C * F)
        tables, head, widest = V * C, 0 if config.tied else V * C, max(2 * F, qkv)
    size = dtype.itemsize
    shape = CacheShape(
        L, batch, config.num_heads, config.num_kv_heads, capacity, config.head_dim, dtype, storage
    )
    rows = min(batch * prompt, max(PROMPT_TOKENS, prompt))
    whole = (linears + tables + head) * size
    kept = linear_bytes(linears, format, size, group_size) + tables * size
    kept += linear_bytes(head, "int8" if format in HEAD_IN_INT8 else None, size)
    return Footprint(
        weights=kept,
        cache=shape.bytes,
        prompt=rows * (2 * widest + inner + 4 * C) * size + 3 * batch * V * 4,
        before=0 if format is None or ready else whole + linear_bytes(widest * C, format, size),
    )


def check_memory(wanted: Footprint, device: torch.device, draft: Footprint | None = None) -> None:
    """`InputError` if `device` has less than that free, with what takes it and what would help. A `draft` is
    loaded beside it, once it is as it will be kept."""
    free = available(device)
    running = wanted.weights + wanted.cache + wanted.prompt
    total = max(wanted.total, running + draft.total) if draft is not None else wanted.total
    if total <= free:
        return
    if wanted.before == total:
        what = f"the weights before they are quantized take {wanted.before / GIB:.1f} GiB"
        mend = "Save the quantized model once on a larger machine, or take a smaller one"
    else:
        what = (
            f"weights {wanted.weights / GIB:.1f}, cache {wanted.cache / GIB:.1f} and prompt "
            f"{wanted.prompt / GIB:.1f} GiB"
        )
        if draft is not None:
            what += f", the draft {draft.total / GIB:.1f} GiB"
        mend = "Take fewer rows, a shorter context, int8 or int4 weights (--quant) or an int8 cache (--cache)"
    raise InputError(
        f"This would take {total / GIB:.1f} GiB on {device} ({what}), and {free / GIB:.1f} are free. {mend}."
    )
