"""Stochastic rounding: its draws are fair, and a function of step and place alone."""

from __future__ import annotations

import pytest
import torch

from fuseline.optim.rounding import DRAWS, draws, to_bfloat16

STEP = torch.tensor(7.0)


def test_draws_are_even_and_independent() -> None:
    drawn = draws(STEP, 0, 0, 1 << 18).double() / DRAWS
    others = [
        torch.roll(drawn, 1),
        draws(STEP + 1, 0, 0, 1 << 18).double() / DRAWS,
        draws(STEP, 1, 0, 1 << 18).double() / DRAWS,
    ]
    assert drawn.min() >= 0
    assert drawn.max() < 1
    shares = torch.histc(drawn, 16, 0, 1) / len(drawn)
    assert (shares - 1 / 16).abs().max() < 3e-3  # five standard deviations
    for other in others:
        assert abs(torch.corrcoef(torch.stack((drawn, other)))[0, 1].item()) < 0.01


@pytest.mark.parametrize("start", [0, 1, 255, 2**31 - 40, 2**32 + 5])
def test_a_place_has_its_draw_however_it_is_reached(start: int) -> None:
    whole = draws(STEP, 3, start, 100)
    assert torch.equal(whole[30:], draws(STEP, 3, start + 30, 70))
    assert whole[0] == draws(STEP, 3, start, 1)[0]


def test_rounding_keeps_the_expectation() -> None:
    x = torch.linspace(1.0, 1.0078125, 9)[:, None].expand(9, 1 << 16).contiguous()  # between two of bf16's
    rounded = to_bfloat16(x, draws(STEP, 0, 0, x.numel()).view_as(x)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0078125}
    assert torch.allclose(rounded.mean(1), x[:, 0], atol=1e-4)


def test_what_bf16_has_stays() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, 3.0e38, float("inf"), -float("inf"), float("nan")])
    x = x.to(torch.bfloat16).float()
    rounded = to_bfloat16(x, torch.full((8,), DRAWS - 1, dtype=torch.int32))
    assert torch.equal(rounded.float().nan_to_num(7.0), x.nan_to_num(7.0))
