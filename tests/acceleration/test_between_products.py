"""What counts as torch's own work between products, and when it is too little to compile."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fuseline.acceleration.between_products import LAUNCH_S, BetweenProducts, seconds_between_products
from fuseline.acceleration.forms import KERNELS, WORTH_COMPILING, Form, choose
from fuseline.ops import layer_norm

X = torch.randn(8, 16)


def test_reads_and_writes_count_and_views_and_products_do_not() -> None:
    with BetweenProducts() as seen:
        y = X + X.t().contiguous().t()
        (y.view(16, 8) @ torch.randn(8, 4)).transpose(0, 1)
    drawn = 8 * 4 * 4
    copied, added = 2 * 8 * 16 * 4, 3 * 8 * 16 * 4
    assert (seen.operations, seen.moved_bytes) == (3, copied + added + drawn)
    assert seen.seconds(1.0) == pytest.approx(3 * LAUNCH_S + seen.moved_bytes / 1e9)


def test_the_backward_counts_and_an_expanded_tensor_is_read_once() -> None:
    x = X.clone().requires_grad_()
    with BetweenProducts() as forward:
        loss = (x * torch.ones(1).expand(8, 16)).exp()
    with BetweenProducts() as backward:
        loss.backward(X)
    assert (forward.operations, forward.moved_bytes) == (3, 4 + 4 + 4 * 8 * 16 * 4)
    assert backward.operations >= 2
    assert backward.moved_bytes >= 5 * 8 * 16 * 4


def test_ops_of_ours_do_not_count() -> None:
    x, weight = X.clone().requires_grad_(), torch.ones(16)
    with BetweenProducts() as ours:
        layer_norm(x, (16,), weight)
    with BetweenProducts() as theirs:
        torch.nn.functional.layer_norm(x, (16,), weight)
    assert ours.moved_bytes < theirs.moved_bytes
    assert seconds_between_products(lambda: x.exp(), torch.device("cpu")) > LAUNCH_S


@pytest.mark.parametrize("share, tried", [(0.9, False), (1.1, True)])
def test_others_are_tried_where_there_is_enough_to_save(share: float, tried: bool) -> None:
    plain, compiled = (Form(name, contextlib.nullcontext) for name in (KERNELS, "compiled"))
    asked: list[Form] = []

    def seconds_of(form: Form) -> float:
        asked.append(form)
        return 0.1

    choice = choose([plain, compiled], seconds_of, lambda form: None, lambda: share * WORTH_COMPILING * 0.1)
    assert (compiled in asked) is tried
    assert choice.form is plain
    if not tried:
        assert choice.refused == {
            "compiled": "not tried: torch's operations between products take only 1.8 ms"
        }
