"""Sizes drawn from a seed, beside those that a suite always measures: kernels were chosen at those, and how
they do elsewhere only others tell."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import cycle, islice

from fuseline.errors import InputError
from fuseline.native import layouts

COUNT = 5
MOST = 100
LABEL = "drawn"  # of the flag in a record's case
ALIGNED = 8  # elements: every other length is a multiple, as most models' are


def check_count(count: int) -> None:
    """`InputError` for a number of sizes that nobody would wait for, or fewer than none."""
    if not 0 <= count <= MOST:
        raise InputError(f"--drawn {count}: it must be 0 to {MOST}.")


def drawn_lengths(
    seed: int,
    low: int,
    high: int,
    known: Collection[int],
    *,
    count: int = COUNT,
    multiple: int | None = None,
) -> tuple[int, ...]:
    """`count` row lengths from `low` to `high`, evenly spread by their logarithm, ascending: none of `known`
    and none that a layout was chosen at. Every other one is a multiple of 8; all are of `multiple`, if given.
    Fewer where there are no more."""
    numbers = random.Random(seed)
    left_out = {*known, *tuned_lengths()}
    found: set[int] = set()
    for turn in range(100 * count):
        if len(found) == count:
            break
        step = multiple or (ALIGNED if turn % 2 else 1)
        n = round(math.exp(numbers.uniform(math.log(low), math.log(high))) / step) * step
        if low <= n <= high and n not in left_out:
            found.add(n)
    return tuple(sorted(found))


def dealt(count: int, names: Sequence[str]) -> Counter[str]:
    """How many of `count` draws each of `names` gets, dealt out one by one."""
    return Counter(islice(cycle(names), count))


def with_as_many_tokens(batch: int, seqlen: int, length: int) -> int:
    """The batch of sequences of `length` tokens that has about as many tokens as `batch` of `seqlen`."""
    return max(1, round(batch * seqlen / length))


@functools.cache
def tuned_lengths() -> frozenset[int]:
    """The row lengths in the table of kernel layouts."""
    table = layouts.read(layouts.TABLE.read_text(encoding="utf-8"))
    return frozenset(longest for lines in table.values() for longest, _ in lines)
