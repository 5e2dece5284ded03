from __future__ import annotations

import pytest

from fuseline.models.gpt_config import preset
from fuseline.training.memory_estimate import estimated_bytes

# Peaks measured on one H100 (nanoGPT's model, eager, bf16).
MEASURED_GIB = [
    ("gpt2", 124e6, 16, "flash", 16.0),
    ("gpt2", 124e6, 16, "naive", 29.6),
    ("shakespeare", 10.65e6, 64, "auto", 1.6),
    ("shakespeare", 10.65e6, 64, "naive", 2.5),
]


@pytest.mark.parametrize("name, parameters, batch, attention, measured", MEASURED_GIB)
def test_it_is_within_a_quarter(
    name: str, parameters: float, batch: int, attention: str, measured: float
) -> None:
    config = preset(name, attention=attention, vocab_multiple=64)
    estimate = estimated_bytes(config, int(parameters), batch, "bf16") / 2**30
    assert estimate == pytest.approx(measured, rel=0.25)
