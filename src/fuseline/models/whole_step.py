"""What a whole decoding step in one launch reads of a model (`fuseline.ops.decode_step`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from fuseline.models.gpt import GPT
from fuseline.models.gpt_block import Block as GPTBlock
from fuseline.models.llama import Block as LlamaBlock
from fuseline.models.llama import Llama
from fuseline.ops.decode_step import StepModel

Modules = tuple[nn.Module, ...]
"""Of a layer: norm, qkv, out, norm of the MLP, up, down."""


def whole_step(model: object) -> StepModel | None:
    """None for a model that is neither GPT nor Llama, is quantized, or has what a step does not know."""
    if isinstance(model, GPT) and model.config.norm == "fuseline":
        return _of_gpt(model)
    if isinstance(model, Llama) and model.config.kernels == "fuseline":
        return _of_llama(model)
    return None


def _of_gpt(model: GPT) -> StepModel | None:
    config, tables = model.config, model.transformer
    layers = [
        (b.ln_1, b.attn.c_attn, b.attn.c_proj, b.ln_2, b.mlp.c_fc, b.mlp.c_proj)
        for b in cast(Sequence[GPTBlock], tables.h)
    ]
    if not _plain([*layers, (model.lm_head,)]):
        return None
    return StepModel(
        *_taken(layers),
        token_table=_tensor(tables.wte, "weight"),
        norm=_tensor(tables.ln_f, "weight"),
        head=_tensor(model.lm_head, "weight"),
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        norm_kind="layer",
        activation=config.activation,
        eps=float(tables.ln_f.eps),  # type: ignore[arg-type]
        position_table=_tensor(tables.wpe, "weight"),
        norm_bias=_bias(tables.ln_f),
    )


def _of_llama(model: Llama) -> StepModel | None:
    config = model.config
    windows = {config.window_of(layer) for layer in range(config.num_layers)}
    layers = [
        (b.attention.norm, b.attention.qkv, b.attention.out, b.mlp.norm, b.mlp.gate_up, b.mlp.down)
        for b in cast(Sequence[LlamaBlock], model.blocks)
    ]
    if config.qk_norm or len(windows) != 1 or not _plain([*layers, (model.head,)]):
        return None
    return StepModel(
        *_taken(layers),
        token_table=_tensor(model.embedding, "weight"),
        norm=_tensor(model.norm, "weight"),
        head=_tensor(model.head, "weight"),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        norm_kind="rms",
        activation="swiglu",
        eps=config.eps,
        cos=model.rotary.cos,
        sin=model.rotary.sin,
        window=windows.pop(),
    )


def _plain(layers: Sequence[Modules]) -> bool:
    """Whether each linear is torch's own, with a weight in the place of a quantized one's."""
    known = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
    return all(type(part) is nn.Linear or isinstance(part, known[1:]) for layer in layers for part in layer)


def _taken(
    layers: Sequence[Modules],
) -> tuple[tuple[tuple[Tensor, ...], ...], tuple[tuple[Tensor | None, ...], ...]]:
    weights = tuple(tuple(_tensor(part, "weight") for part in layer) for layer in layers)
    return weights, tuple(tuple(_bias(part) for part in layer) for layer in layers)


def _tensor(module: nn.Module, name: str) -> Tensor:
    held = getattr(module, name)
    assert isinstance(held, torch.Tensor)
    return held.detach()


def _bias(module: nn.Module) -> Tensor | None:
    return None if getattr(module, "bias", None) is None else _tensor(module, "bias")
