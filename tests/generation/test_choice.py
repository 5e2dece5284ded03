"""Draws: filters against plain formulas, frequencies against probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fuseline.errors import InputError
from fuseline.generation.choice import GREEDY, Sampling, choose, drawn, penalized, probabilities

LOGITS = torch.randn(3, 40, generator=torch.Generator().manual_seed(5)) * 3


def by_hand(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The definition, token by token."""
    p = (logits_V.double() / sampling.temperature).softmax(-1)
    ranked = sorted(range(len(p)), key=lambda i: -float(p[i]))
    kept = ranked[: sampling.top_k or len(ranked)]
    if sampling.top_p is not None:
        total = sum(float(p[i]) for i in kept)
        fewest, sum_p = [], 0.0
        for i in kept:
            if sum_p >= sampling.top_p:
                break
            fewest.append(i)
            sum_p += float(p[i]) / total
        kept = fewest
    if sampling.min_p is not None:
        kept = [i for i in kept if p[i] >= sampling.min_p * p[ranked[0]]]
    mask = torch.zeros_like(p)
    mask[kept] = 1
    return p * mask / (p * mask).sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_k": 100},
        {"top_p": 0.7},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
    ],
)
def test_filters_are_their_definitions(options: dict[str, float]) -> None:
    sampling = Sampling(**options)
    expected = torch.stack([by_hand(row, sampling) for row in LOGITS])
    torch.testing.assert_close(probabilities(LOGITS, sampling).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.6, "temperature": 1.3}])
def test_draws_follow_the_probabilities(options: dict[str, float]) -> None:
    sampling, count = Sampling(**options), 20_000
    expected = probabilities(LOGITS[:1], sampling)[0]
    generator = torch.Generator().manual_seed(0)
    tokens = choose(LOGITS[:1].expand(count, -1), sampling, generator)
    frequencies = torch.bincount(tokens, minlength=40) / count
    assert torch.equal(frequencies[expected == 0], torch.zeros(int((expected == 0).sum())))
    assert ((frequencies - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=1), Sampling(top_p=1e-9)])
def test_the_likeliest_token(sampling: Sampling) -> None:
    assert torch.equal(choose(LOGITS, sampling), LOGITS.argmax(-1))
    assert torch.equal(probabilities(LOGITS, sampling).argmax(-1), LOGITS.argmax(-1))


def test_the_same_generator_the_same_tokens() -> None:
    draws = [choose(LOGITS, Sampling(), torch.Generator().manual_seed(seed)) for seed in (1, 1)]
    assert torch.equal(*draws)


def test_nothing_is_drawn_that_cannot_be() -> None:
    p = torch.tensor([[0.0, 0.0, 1e-30, 0.0]]).expand(1000, -1)
    assert drawn(p).eq(2).all()


def test_repetition_penalty_is_that_of_ctrl() -> None:
    seen = torch.zeros(3, 40, dtype=torch.bool)
    seen[:, ::3] = True
    out = penalized(LOGITS, seen, 1.5)
    assert torch.equal(out[~seen], LOGITS[~seen])
    assert torch.equal(out[seen], torch.tensor([x / 1.5 if x > 0 else x * 1.5 for x in LOGITS[seen]]))


@pytest.mark.parametrize(
    "options,message",
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": 0.0, "top_k": 5, "min_p": 0.1}, "top_k and min_p would change nothing"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**options)
