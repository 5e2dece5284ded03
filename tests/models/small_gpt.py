"""A GPT of two layers, and tokens for it."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseline.models.gpt import GPT, GPTConfig


def small(**overrides: object) -> GPTConfig:
    sizes = {"block_size": 16, "vocab_size": 37, "num_layers": 2, "num_heads": 4, "embed_dim": 32}
    return GPTConfig(**{**sizes, **overrides})


def make(config: GPTConfig, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():  # fresh norms and biases are 1 and 0, which would hide a mistake in them
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name not in ("transformer.wte.weight", "transformer.wpe.weight"):
                parameter.mul_(5)
    return model


def draw(config: GPTConfig, batch: int = 3, seqlen: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (batch, seqlen + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
