from __future__ import annotations

import pytest

from fuseline.models.gpt_config import preset
from fuseline.training.memory_estimate import estimated_bytes

# Peaks measured on one H100 (nanoGPT's model, eager, bf16), and of our step on one H200.
MEASURED_GIB = [
    ("gpt2", 124e6, 16, "flash", "float32", 16.0),
    ("gpt2", 124e6, 16, "naive", "float32", 29.6),
    ("gpt2", 124e6, 16, "pick", "fuseline-linear", 7.9),
    ("gpt2", 124e6, 64, "pick", "fuseline-linear", 18.9),
    ("shakespeare", 10.65e6, 64, "auto", "float32", 1.6),
    ("shakespeare", 10.65e6, 64, "naive", "float32", 2.5),
]


@pytest.mark.parametrize("name, parameters, batch, attention, loss, measured", MEASURED_GIB)
def test_it_is_within_a_quarter(
    name: str, parameters: float, batch: int, attention: str, loss: str, measured: float
) -> None:
    config = preset(name, attention=attention, vocab_multiple=64, loss=loss)
    estimate = estimated_bytes(config, int(parameters), batch, "bf16") / 2**30
    assert estimate == pytest.approx(measured, rel=0.25)
