"""What ops say to arguments that do not fit: the value seen, why, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuseline import ops
from fuseline.errors import InputError

X = torch.randn(2, 3, 4)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: ops.softmax(X, 3), IndexError, r"dim=3 is out of range for x with 3 dimensions"),
        (lambda: ops.softmax(X, -4), IndexError, r"from -3 to 2"),
        (lambda: ops.softmax(X.long()), TypeError, r"takes float32, .* not Long"),
        (lambda: ops.softmax(X, 1, causal=True), ValueError, r"shape \[2, 3, 4\] and dim=1. Transpose x"),
        (lambda: ops.softmax(X[0, 0], causal=True), ValueError, r"over \[..., T, S\]"),
        (
            lambda: ops.softmax(X, mask=torch.ones(3, 5)),
            ValueError,
            r"\[3, 5\] does not broadcast to x of shape",
        ),
        (lambda: ops.softmax(X, mask=torch.ones(1, 2, 3, 4)), ValueError, r"does not broadcast"),
        (
            lambda: ops.softmax(X, mask=torch.ones(3, 4).long()),
            TypeError,
            r"mask has dtype Long.*mask.bool\(\)",
        ),
        (lambda: ops.layer_norm(X, 5), ValueError, r"\[5\] are not the last dimensions of x.*\[2, 3, 4\]"),
        (lambda: ops.layer_norm(X, ()), ValueError, r"are not the last dimensions"),
        (lambda: ops.layer_norm(X, (1, 2, 3, 4)), ValueError, r"are not the last dimensions"),
        (lambda: ops.layer_norm(X, 4, torch.ones(3)), ValueError, r"weight has shape \[3\].*\[4\]"),
        (lambda: ops.layer_norm(X, 4, None, torch.ones(3)), ValueError, r"bias has shape \[3\]"),
        (lambda: ops.layer_norm(X, 4, torch.ones(4).half()), TypeError, r"weight is Half and the result"),
        (lambda: ops.layer_norm(X.int(), 4), TypeError, r"takes float32"),
        (lambda: ops.rms_norm(X, torch.ones(3)), ValueError, r"rms_norm: normalized_shape \[3\] are not"),
        (lambda: ops.rms_norm(X[0, 0, 0]), ValueError, r"x has no dimensions"),
        (lambda: ops.add_rms_norm(X, X[0]), ValueError, r"residual has shape \[3, 4\] and x \[2, 3, 4\]"),
        (lambda: ops.add_layer_norm(X, X.half(), 4), TypeError, r"residual is Half and x Float"),
        (lambda: ops.dropout_add_layer_norm(X, X, 4, p=1.5), ValueError, r"p=1.5 is not between 0 and 1"),
        (
            lambda: ops.dropout_add_rms_norm(X, X, p=0.5, seed=torch.ones(2, dtype=torch.int64)),
            ValueError,
            r"seed has shape \[2\]; it is one element",
        ),
        (
            lambda: ops.dropout_add_layer_norm(
                X.half(), X.half(), 4, torch.ones(4), x_bias=torch.ones(4).half()
            ),
            TypeError,
            r"weights and x_bias are Float and Half",
        ),
        (
            lambda: ops.layer_norm(X.half(), 4, torch.ones(4), torch.ones(4).half()),
            TypeError,
            r"weight is Float and bias Half",
        ),
    ],
)
def test_is_refused_with_a_reason(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_compiler_sees_the_same_refusal() -> None:
    """Meta kernels check what the others check: a wrong shape fails while tracing, not later."""
    fake = X.to("meta")
    with pytest.raises(ValueError, match="are not the last dimensions"):
        ops.layer_norm(fake, 5)
    with pytest.raises(ValueError, match="does not broadcast"):
        ops.softmax(fake, mask=torch.ones(3, 5, device="meta"))


def test_refusals_of_second_derivatives_lead_to_a_reference():
    """They name `fuseline.ops.get(op)`, which says where the reference of an op without a record is."""
    with pytest.raises(InputError, match=r'attention\(\.\.\., backend="math"\)'):
        ops.get("attention")
    with pytest.raises(InputError, match=r"`reference` of the module fuseline\.ops\."):
        ops.get("self_attention_layer")
    q = torch.randn(1, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda q: ops.attention(q, q, q, causal=True, backend="math"), q)
