"""The memory of a generation, counted before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from fuseline.errors import InputError
from fuseline.generation.footprint import Footprint, available, check_memory, footprint
from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import GPTConfig
from fuseline.models.gpt_config import preset as gpt_preset
from fuseline.models.llama import Llama
from fuseline.models.llama_config import LlamaConfig, preset

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "config", [preset("llama2-7b"), preset("llama3.2-1b"), preset("qwen3-0.6b"), gpt_preset("gpt2")]
)
def test_weights_are_those_of_the_model(config: GPTConfig | LlamaConfig) -> None:
    with torch.device("meta"):
        model: GPT | Llama = GPT(config) if isinstance(config, GPTConfig) else Llama(config)
    bytes_ = sum(p.numel() for p in model.parameters()) * 2
    found = footprint(config, batch=1, prompt=8, capacity=16, dtype=torch.bfloat16)
    assert found.weights == pytest.approx(bytes_, rel=1e-3)
    small = footprint(config, batch=1, prompt=8, capacity=16, dtype=torch.bfloat16, format="int4")
    assert small.weights < found.weights
    assert small.before >= found.weights


def test_too_much_is_refused_with_what_takes_it() -> None:
    assert available(CPU) > 0
    check_memory(Footprint(1, 1, 1), CPU)
    with pytest.raises(InputError, match=r"weights 0\.0, cache 4294967296\.0"):
        check_memory(Footprint(1, 1 << 62, 1), CPU)
    with pytest.raises(InputError, match="before they are quantized"):
        check_memory(Footprint(1, 1, 1, before=1 << 63), CPU)
