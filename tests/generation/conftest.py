"""Small models with logits far apart, and the plainest way to continue a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseline.models.gpt import GPT, GPTConfig
from fuseline.models.llama import Llama, preset

PROMPTS = [[1, 2, 3], [5], [7, 8, 9, 10, 11, 12, 13, 14, 15]]
MODELS = ("llama", "windowed", "gpt", "torch-gpt")


def made(name: str, **changes: Any) -> GPT | Llama:
    torch.manual_seed(0)
    model: GPT | Llama
    if name == "wide":  # heads that the kernels know
        model = Llama(preset("llama-tiny", head_dim=64, qk_norm=True, **changes))
    elif name == "llama":
        model = Llama(preset("llama-tiny", **changes))
    elif name == "windowed":
        model = Llama(preset("llama-tiny", window=6, qk_norm=True, qkv_bias=True, tied=True, **changes))
    else:
        norm, width = "torch" if name == "torch-gpt" else "fuseline", 256 if name == "wide-gpt" else 64
        model = GPT(GPTConfig(256, 512, 2, 4, width, vocab_multiple=96, norm=norm, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.eval()


def recomputed(model: GPT | Llama, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens, the whole text read anew for each."""
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt], device=device)
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens[0, len(prompt) :].tolist()


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> GPT | Llama:
    return made(request.param)
