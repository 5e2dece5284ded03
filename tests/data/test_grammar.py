from __future__ import annotations

import random

import pytest

from fuseline.data.grammar import english_number, generate, german_number, sentence, split_of


@pytest.mark.parametrize(
    ("n", "german", "english"),
    [
        (0, "null", "zero"),
        (1, "eins", "one"),
        (16, "sechzehn", "sixteen"),
        (21, "einundzwanzig", "twenty-one"),
        (30, "dreißig", "thirty"),
        (101, "einhunderteins", "one hundred and one"),
        (276, "zweihundertsechsundsiebzig", "two hundred and seventy-six"),
        (1000, "eintausend", "one thousand"),
        (5017, "fünftausendsiebzehn", "five thousand and seventeen"),
        (342_101, "dreihundertzweiundvierzigtausendeinhunderteins", "three hundred and forty-two thousand "
         "one hundred and one"),
    ],
)  # fmt: skip
def test_numbers_are_said_right(n: int, german: str, english: str) -> None:
    assert german_number(n) == german
    assert english_number(n) == english


def test_the_splits_share_no_sentence_and_no_combination() -> None:
    pairs = generate(3000, 100)
    assert {split: len(found) for split, found in pairs.items()} == {
        "train": 3000,
        "validation": 100,
        "test": 100,
    }
    germans = [german for found in pairs.values() for german, _ in found]
    assert len(set(germans)) == len(germans)
    # What each sentence combines, drawn again by the same generator.
    combinations: dict[str, tuple[str, ...]] = {}
    random_ = random.Random(0)
    while len(combinations) < len(germans):
        drawn = sentence(random_)
        if drawn.german in set(germans):
            combinations[drawn.german] = drawn.combination
    by_split = {split: {combinations[german] for german, _ in found} for split, found in pairs.items()}
    assert not by_split["train"] & by_split["test"]
    assert not by_split["train"] & by_split["validation"]
    assert not by_split["validation"] & by_split["test"]
    assert all(split_of(c) == split for split, found in by_split.items() for c in found)
    assert () not in by_split["test"]  # every sentence has a number or a name


def test_it_is_the_same_every_time() -> None:
    assert generate(50, 5) == generate(50, 5) != generate(50, 5, seed=1)
