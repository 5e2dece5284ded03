"""Calls past torch.ops give what torch.ops gives, and decline what they do not take."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from fuseline import native, ops
from fuseline.native import direct


@pytest.fixture(autouse=True)
def enabled() -> None:
    assert native.ready("cpu")
    if direct.reason:
        pytest.skip(direct.reason)


class Subclass(torch.Tensor):
    pass


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_equals_torch_ops() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    through = torch.ops.fuseline
    for given, expected in (
        (direct.softmax(x, 0), through.softmax(x, 0)),
        (direct.softmax(x, -1, 2, True), through.softmax(x, -1, scale=2.0, causal=True)),
        (
            direct.softmax(x, -1, 0.5, False, x > 0),
            through.softmax(x, -1, scale=0.5, causal=False, mask=x > 0),
        ),
        (direct.gelu(x, weight, "none"), through.gelu(x, weight, "none")),
        (
            direct.layer_norm(x, [8], weight, None, 1e-3, torch.bfloat16),
            through.layer_norm(x, [8], weight, None, 1e-3, out_dtype=torch.bfloat16),
        ),
        (
            direct.rope(x, None, None, None, 10.0, True, 4),
            through.rope(x, base=10.0, interleaved=True, dims=4),
        ),
    ):
        assert torch.equal(given, expected)
    for given, expected in zip(
        direct.add_rms_norm(x, x, weight), through.add_rms_norm(x, x, weight), strict=True
    ):
        assert torch.equal(given, expected)


def test_gradients_flow() -> None:
    x = torch.nn.Parameter(torch.randn(3, 8))
    y = direct.softmax(x, -1)
    assert y.requires_grad
    (grad,) = torch.autograd.grad(y[:, 0].sum(), x)
    (expected,) = torch.autograd.grad(torch.softmax(x, -1)[:, 0].sum(), x)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((torch.ones(3, dtype=torch.int32), -1), TypeError), ((torch.ones(3), 4), IndexError)],
)
def test_errors_keep_their_kind(arguments: tuple[object, ...], error: type[Exception]) -> None:
    with pytest.raises(error, match="softmax"):
        direct.softmax(*arguments)


def test_declines_what_it_does_not_take() -> None:
    x = torch.randn(3, 8)
    assert direct.softmax(x.as_subclass(Subclass), -1) is None
    assert direct.softmax(x, "last") is None
    assert direct.softmax() is None
    assert direct.softmax(x, -1, 1.0, False, None, 1) is None
    assert direct.softmax(x.to("meta"), -1) is None
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert direct.softmax(fake, -1) is None
        assert ops.softmax(fake).shape == x.shape
    with Counting() as counted:
        assert torch.equal(ops.softmax(x), torch.ops.fuseline.softmax(x))
    assert counted.calls >= 2


def test_a_trace_records_the_op() -> None:
    traced = torch.jit.trace(ops.softmax, (torch.randn(3, 8),), check_trace=False)
    assert "fuseline::softmax" in str(traced.graph)
