"""A whole step in one launch: its definition against the models, and the kernel against its definition."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuseline.generation.decoder import Decoder
from fuseline.models.whole_step import whole_step
from fuseline.ops.decode_step import reference, workspace
from fuseline.quant import quantize

from .decode_step_models import MODELS, made


@pytest.mark.parametrize("name", MODELS)
def test_the_definition_is_the_models_own_step(name: str) -> None:
    model = made(name)
    step = whole_step(model)
    assert step is not None
    assert not step.head.requires_grad
    decoder = Decoder(model, batch=1, capacity=60)
    prompt = list(range(45))
    token = decoder.begin([prompt]).clone()
    k, v, length = decoder.cache.k.clone(), decoder.cache.v.clone(), decoder.cache.lengths_B.clone()
    for _ in range(5):
        reference(step, token, k, v, length)
        assert token.tolist() == decoder.advance().tolist()
    torch.testing.assert_close(k, decoder.cache.k)


def test_what_a_step_does_not_know_is_left_to_the_model() -> None:
    assert whole_step(made("llama", qk_norm=True)) is None
    assert whole_step(made("windowed", first_windowed_layer=1)) is None
    assert whole_step(made("gpt", norm="torch")) is None
    model = made("llama", kernels="fuseline")
    quantize(model, "int8")
    assert whole_step(model) is None
    step = whole_step(made("gpt"))
    assert step is not None
    assert workspace(step) is None  # not on a GPU


@pytest.mark.gpu
def test_the_kernel() -> None:
    """In a process of its own, which blocks that wait for each other in vain would take along."""
    cases = Path(__file__).with_name("decode_step_kernel.py")
    # pytest-benchmark, where it is installed, warns inside a worker, and warnings are errors.
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", *plugins, str(cases)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
