from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fuseline.errors import InputError
from fuseline.training.config import PRESETS, TrainConfig, as_dict, continued, preset
from fuseline.training.schema import changed


def test_it_is_read_without_torch() -> None:
    code = "import sys, fuseline.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_shakespeare_preset_is_nanogpts() -> None:
    config = preset("shakespeare")
    assert (config.num_layers, config.num_heads, config.embed_dim) == (6, 6, 384)
    assert (config.batch_size, config.block_size, config.dropout) == (64, 256, 0.2)
    assert (config.learning_rate, config.min_learning_rate, config.steps) == (1e-3, 1e-4, 5000)
    assert (config.beta2, config.warmup_steps, config.weight_decay, config.grad_clip) == (0.99, 100, 0.1, 1.0)


def test_the_gpt2_preset_takes_half_a_million_tokens_a_step() -> None:
    assert preset("gpt2").tokens_per_step == 491_520
    assert preset("gpt2").model_config(50257).padded_vocab_size == 50304


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_being_written_down(name: str) -> None:
    assert TrainConfig(**as_dict(PRESETS[name])) == PRESETS[name]


@pytest.mark.parametrize(
    "values, complaint",
    [
        ({"num_heads": 3}, "128 cannot be split among 3 heads"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"steps": -5}, "steps is -5"),
        ({"minutes": 0.0}, "minutes is 0.0"),
        ({"patience": 3, "eval_interval": 0}, "patience 3 counts validations"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"beta2": 1.0}, "beta2 is 1.0"),
        ({"grad_clip": -1.0}, "grad_clip is -1.0"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"dropout": 1.5}, "dropout is 1.5"),
    ],
)
def test_values_that_cannot_be_are_told(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        preset("tiny", **values)


def test_unknown_names_are_told() -> None:
    with pytest.raises(InputError, match="shakespeare"):
        preset("shakespear")
    with pytest.raises(InputError, match="batch_size"):
        changed(preset("tiny"), {"batchsize": 4})


def test_a_resumed_run_may_change_its_length_but_not_its_course() -> None:
    saved = preset("tiny")
    assert continued(saved, {"steps": 900, "eval_interval": 7}).steps == 900
    assert continued(saved, {"batch_size": saved.batch_size}) == saved
    with pytest.raises(InputError, match="begun with batch_size=16"):
        continued(saved, {"batch_size": 8})
