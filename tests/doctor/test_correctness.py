"""The check of every op finds what is wrong with one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fuseline import native, ops
from fuseline.doctor import correctness
from fuseline.ops import Case, Op


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad_out):
        return 3 * grad_out


def fails(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the device is on fire\nand more")


OP = Op(
    name="double",
    function=double,
    reference=double,
    inputs=lambda case, device, dtype, g: {
        "x": torch.randn(case.shape, generator=g, device=device).to(dtype)
    },
    differentiable=("x",),
    cases=(Case("a few", (3, 5)),),
    bytes_moved=lambda case, itemsize, direction: 0,
    flops=lambda case, direction: 0,
)


@pytest.fixture
def check_of(monkeypatch):
    def check(**changes):
        monkeypatch.setattr(ops, "registered", lambda: (replace(OP, **changes),))
        monkeypatch.setattr(native, "ready", lambda device: False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        (made,) = correctness.checks()
        return made

    return check


def test_a_right_op_is_well_and_says_who_computed(check_of):
    check = check_of()
    assert (check.name, check.state) == ("double on cpu", "ok")
    assert "by its reference" in check.found


@pytest.mark.parametrize(
    "function",
    [lambda x: 2.001 * x, lambda x: x * float("nan"), WrongGradient.apply],
    ids=["off", "nan", "gradient"],
)
def test_a_wrong_op_is_broken(check_of, function):
    check = check_of(function=function)
    assert check.state == "bad"
    assert "wrong in float32" in check.found
    assert check.mend


def test_a_slightly_wrong_op_is_broken_only_where_its_dtype_can_tell(check_of):
    check = check_of(function=lambda x: 2.0001 * x)
    assert "wrong in float32:" in check.found


def test_an_op_may_err_twice_as_much_as_its_reference_and_no_more(check_of):
    def third(x: torch.Tensor) -> torch.Tensor:
        return x / 3  # rounded: off by some 3e-8 in float32

    def further_off(x: torch.Tensor) -> torch.Tensor:
        return third(x) * 1.000001

    assert check_of(reference=third, function=third).state == "ok"
    assert "wrong in float32:" in check_of(reference=third, function=further_off).found


def test_what_is_told_is_the_largest_error(check_of):
    def third_and_itself(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x / 3, x + 0  # the second one is exact

    found = check_of(reference=third_and_itself, function=third_and_itself).found
    errors = [float(said.split()[-1]) for said in found.partition("errors ")[2].split(", ")]
    assert all(error > 0 for error in errors)


def test_an_op_that_fails_is_broken_and_says_how(check_of):
    check = check_of(function=fails)
    assert check.state == "bad"
    assert check.found == "failed with RuntimeError: the device is on fire"
