"""Backends by name, and what a processor cannot run."""

from __future__ import annotations

import pytest
import torch

from fuseline.bench.compile.backends import BACKENDS, find_backends, why_not
from fuseline.errors import InputError
from fuseline.training.execution import EXECUTIONS


def test_eager_comes_first_and_each_once_whatever_the_order_asked_for() -> None:
    found = find_backends(("inductor", "eager", "inductor"))
    assert [backend.name for backend in found] == ["eager", "inductor"]


def test_an_unknown_backend_is_met_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"no backend named 'induktor'\. Did you mean 'inductor'"):
        find_backends(("induktor",))


def test_every_backend_is_an_execution_of_the_training_step_and_needs_a_gpu_if_that_does() -> None:
    for backend in BACKENDS.values():
        assert EXECUTIONS[backend.execution].needs_cuda == (why_not(backend, torch.device("cpu")) is not None)
        assert why_not(backend, torch.device("cuda")) is None
