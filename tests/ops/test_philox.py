"""The random words of dropout: the published vectors, and a mask that has the share it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fuseline import ops
from fuseline.errors import InputError
from fuseline.ops import philox

from .recorded import recorded

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
Draw = Callable[[torch.Tensor], torch.Tensor]


def of_embedding(x: torch.Tensor) -> torch.Tensor:
    return ops.embedding(torch.arange(len(x), device=x.device), x, p=0.5)


def of_layer_norm(x: torch.Tensor) -> torch.Tensor:
    return ops.dropout_add_layer_norm(x, torch.zeros_like(x), x.shape[-1], p=0.5)[1]


def of_rms_norm(x: torch.Tensor) -> torch.Tensor:
    return ops.dropout_add_rms_norm(x, torch.zeros_like(x), p=0.5)[1]


def test_words_are_the_published_ones() -> None:
    """Random123's known answers for philox4x32 with 7 rounds, of a counter and a key of zeros."""
    words = philox.words(torch.zeros(1, dtype=torch.int64), 6)
    assert words[:4].tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert len(words) == 6


def test_words_take_both_halves_of_the_seed() -> None:
    seeds = [torch.tensor([seed]) for seed in (1, 1 << 32, -1, 1 - (1 << 63))]
    drawn = [philox.words(seed, 64) for seed in seeds]
    for i, one in enumerate(drawn):
        assert (one >= 0).all()
        assert (one < 2**32).all()
        assert all(not torch.equal(one, other) for other in drawn[:i])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_mask_has_its_share_and_its_scale(p: float) -> None:
    mask = philox.multipliers(torch.tensor([7]), (500, 401), p)
    dropped = float((mask == 0).double().mean())
    assert abs(dropped - p) < 5 * (p * (1 - p) / mask.numel()) ** 0.5 + 1e-12
    if p < 1:
        scale = 65536 / (65536 - round(p * 65536))
        assert torch.equal(mask.unique(), torch.tensor([0.0, scale][p == 0 :], dtype=torch.float64))
    else:
        assert not mask.any()


def test_halves_of_a_word_are_elements_of_their_own() -> None:
    """Every place of a block of eight drops its share, alone and beside every other."""
    kept = philox.multipliers(torch.tensor([11]), (200_000, 8), 0.25) > 0
    shares = kept.double().mean(0)
    assert float((shares - 0.75).abs().max()) < 5 * (0.25 * 0.75 / len(kept)) ** 0.5
    centred = kept.double() - shares
    correlations = centred.T @ centred / len(kept) / (0.25 * 0.75)
    assert float((correlations - torch.eye(8)).abs().max()) < 5 * len(kept) ** -0.5


def test_seeds_follow_the_generator() -> None:
    torch.manual_seed(3)
    first = philox.draw_seed(torch.device("cpu"))
    other = philox.draw_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(philox.draw_seed(torch.device("cpu")), first)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drop", [of_embedding, of_layer_norm, of_rms_norm])
def test_masks_follow_the_generator_and_come_back_in_the_backward_pass(drop: Draw, device: str) -> None:
    x = torch.ones(40, 33, device=device, requires_grad=True)
    torch.manual_seed(5)
    first, other = drop(x), drop(x)
    torch.manual_seed(5)
    assert torch.equal(drop(x), first)
    assert not torch.equal(first, other)
    assert sorted(first.detach().unique().tolist()) == [0.0, 2.0]
    grad = torch.autograd.grad(first, x, torch.full_like(first, 3.0))[0]
    assert torch.equal(grad, 3.0 * first)


@pytest.mark.gpu
@pytest.mark.parametrize("drop", [of_embedding, of_layer_norm, of_rms_norm])
def test_every_replay_of_a_graph_draws_a_mask_of_its_own(drop: Draw) -> None:
    x = torch.ones(40, 33, device="cuda", requires_grad=True)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = drop(x)
        return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]

    graph, (y, grad) = recorded(step)
    masks = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, grad)  # of ones: the mask itself, in both directions
        masks.append(y.clone())
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_refuses_what_is_no_probability() -> None:
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match="not between 0 and 1"):
            philox.check_probability(p, "embedding")


def test_seeds_that_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[int] = []
    alone = philox._draw

    def draw(device: torch.device, count: int) -> torch.Tensor:
        draws.append(count)
        return alone(device, count)

    monkeypatch.setattr(philox, "_draw", draw)
    monkeypatch.setattr(philox, "_drawn", philox._Drawn())
    cpu, seeds = torch.device("cpu"), []
    for wanted in (3, 64, 65):
        with philox.seeds_together():
            seeds += [int(philox.draw_seed(cpu)) for _ in range(wanted)]
    assert draws == [64, 64, 64, 64]
    assert len(set(seeds)) == len(seeds)


def test_seeds_follow_from_the_generator_alone() -> None:
    cpu = torch.device("cpu")

    def drawn(count: int) -> list[int]:
        torch.manual_seed(5)
        with philox.seeds_together():
            return [int(philox.draw_seed(cpu)) for _ in range(count)]

    assert drawn(3) == drawn(70)[:3] == drawn(3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_within_drops_the_same_again(use_reentrant: bool) -> None:
    for _ in range(2):  # the second time several are drawn ahead
        x = torch.ones(64, requires_grad=True)
        with philox.seeds_together():
            before = ops.dropout(x, 0.5)
            y = checkpoint(lambda t: ops.dropout(t, 0.5), x, use_reentrant=use_reentrant)
            after = ops.dropout(x, 0.5)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, y.detach())
        assert not torch.equal(before, after)
