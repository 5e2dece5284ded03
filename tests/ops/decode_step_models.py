"""Small models for tests of a whole step."""

from __future__ import annotations

from typing import Any

import torch

from fuseline.models.gpt import GPT, GPTConfig
from fuseline.models.llama import Llama, preset

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt-without-bias": {"bias": False, "activation": "gelu_tanh"},
    "llama": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
    "wide-heads": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "qkv_bias": True, "tied": True},
    "windowed": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "window": 40},
}


def made(name: str, **changes: Any) -> GPT | Llama:
    torch.manual_seed(0)
    model: GPT | Llama
    if name.startswith("gpt"):
        config = {"num_layers": 2, "num_heads": 4, "embed_dim": 256, "vocab_multiple": 96, "norm": "fuseline"}
        model = GPT(GPTConfig(1024, 500, **(config | MODELS[name] | changes)))
    else:
        model = Llama(preset("llama-tiny", embed_dim=256, ffn_dim=688, **(MODELS[name] | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(torch.randn_like(parameter) * 0.02)
    return model.eval()
