"""Errors against float64: known ones are found, unwritten memory is noticed."""

from __future__ import annotations

import math

import pytest
import torch

from fuseline.bench.ops.accuracy import errors_of
from fuseline.bench.ops.bound import BoundCase, Computation, bind_inputs
from fuseline.ops import Case, get

CPU = torch.device("cpu")


def bound(op: str = "layer_norm", dtype: torch.dtype = torch.float32) -> BoundCase:
    return bind_inputs(get(op), Case("test", (12, 40)), dtype, CPU, seed=1)


def test_a_case_is_a_function_of_its_seed() -> None:
    one, two, other = (
        bound(),
        bound(),
        bind_inputs(get("softmax"), Case("t", (12, 40)), torch.float32, CPU, 2),
    )
    assert torch.equal(one.inputs["x"], two.inputs["x"])
    assert torch.equal(one.grads_out[0], two.grads_out[0])
    assert not torch.equal(one.inputs["x"], other.inputs["x"])
    assert [leaf.shape for leaf in one.leaves] == [(12, 40), (40,), (40,)]


@pytest.mark.parametrize("op", ["softmax", "layer_norm"])
def test_the_reference_is_as_far_from_float64_as_its_dtype(op: str) -> None:
    for dtype, unit in ((torch.float32, 6e-8), (torch.bfloat16, 4e-3)):
        case = bound(op, dtype)
        errors = errors_of(
            Computation(lambda c=case: get(op).reference(**c.inputs), case.leaves, case.grads_out),
            case.truth(),
        )
        assert unit / 100 < errors.forward < 3 * unit
        assert unit / 100 < errors.backward < 5 * unit


def test_an_error_put_in_is_found_forward_and_backward() -> None:
    case = bound()
    wrong = Computation(
        lambda: 1.25 * get("layer_norm").reference(**case.inputs), case.leaves, case.grads_out
    )
    errors = errors_of(wrong, case.truth())
    assert errors.forward == pytest.approx(0.25, abs=1e-5)
    assert errors.backward == pytest.approx(0.25, abs=1e-5)
    assert errors.worst == max(errors.forward, errors.backward)


def test_an_error_in_one_gradient_alone_is_the_backward_error() -> None:
    case = bound()
    halved = {**case.inputs, "bias": 0.5 * case.inputs["bias"] + 0.5 * case.inputs["bias"].detach()}
    errors = errors_of(
        Computation(lambda: get("layer_norm").reference(**halved), case.leaves, case.grads_out), case.truth()
    )
    assert errors.forward < 1e-6
    assert errors.backward == pytest.approx(0.5, abs=1e-5)


def test_a_value_that_is_no_number_is_an_infinite_error() -> None:
    case = bound("softmax")

    def forward() -> torch.Tensor:
        y = get("softmax").reference(**case.inputs)
        return torch.where(torch.arange(40) == 3, math.nan, y)

    assert errors_of(Computation(forward, case.leaves, case.grads_out), case.truth()).forward == math.inf


def test_bytes_of_both_passes_add_up() -> None:
    case = bound("softmax", torch.bfloat16)
    assert case.bytes_moved("fw") == 12 * 40 * 2 * 2
    assert case.bytes_moved("bw") == 12 * 40 * 2 * 3
    assert case.bytes_moved("fwbw") == 12 * 40 * 2 * 5
