"""The random words of dropout: the published vectors, and a mask that has the share it should."""

from __future__ import annotations

import pytest
import torch

from fuseline.errors import InputError
from fuseline.ops import philox


def test_words_are_the_published_ones() -> None:
    """Random123's known answers for philox4x32 with 10 rounds, of a counter and a key of zeros."""
    words = philox.words(torch.zeros(1, dtype=torch.int64), 6)
    assert words[:4].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
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
        assert torch.equal(mask.unique(), torch.tensor([0.0, 1 / (1 - p)][p == 0 :], dtype=torch.float64))


def test_seeds_follow_the_generator() -> None:
    torch.manual_seed(3)
    first = philox.draw_seed(torch.device("cpu"))
    other = philox.draw_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(philox.draw_seed(torch.device("cpu")), first)
    assert not torch.equal(first, other)


def test_refuses_what_is_no_probability() -> None:
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match="not between 0 and 1"):
            philox.check_probability(p, "embedding")
