"""At which length a batch runs: its own, or a longer one that is recorded already.

A CUDA graph is of one shape. Batches of text have another length at nearly every step, and only a handful of
graphs can be kept. The rule, for batches that differ in nothing but their length:

1. The first of them runs as it came, and so do all others of its length: where every batch has one length,
   nothing is ever padded.
2. Any other is padded to the shortest length recorded so far that adds at most a quarter to it (or `STEP`
   positions, if that is more).
3. If there is none, it is padded to the next multiple of an eighth of the power of two above it (at least
   `STEP`), and that length is recorded: 32, 64, 96, 128, 160, .. 256, 320, .. 512, 640, and so on. No length
   is above what the model's configuration allows.

Micro-batches of one step are padded to one length, that of the longest, under the same limit for all of them
together. The number of rows is not changed. Before a length is used, padding to it is proved
(padding_proof.py); a model that it makes a difference to is never padded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

from fuseline.acceleration.padding import (
    Batch,
    kind_of,
    length_of,
    longest_of,
    pad_token,
    padded,
    why_not_padded,
)
from fuseline.acceleration.padding_proof import Measure, NothingProvedError, Run, why_padding_shows
from fuseline.errors import first_line

STEP = 32
MOST_ADDED = 0.25
MOST_TRIES = 3  # proofs with batches that show nothing, before padding is given up
SWITCHED_OFF = "padding is switched off"
Masks = tuple[tuple[Any, ...], ...]
"""Of each micro-batch: the shapes of masks that hide nothing, None for each that hides something."""


class Lengths:
    """Pads batches to lengths that are recorded.

    Attributes:
        reason: why no batch of this model, or none so long, is padded; empty if all can be.
        why: why the last batch was not padded.
        counts: "padded", the steps or calls that were; "given" and "added", the positions in them.
    """

    def __init__(self, model: nn.Module, *, pad: bool = True) -> None:
        self._model, self._token, self._longest = model, pad_token(model), longest_of(model)
        self.reason = "" if pad else SWITCHED_OFF
        self.why = self.reason
        self._never = not pad
        self.counts: Counter[str] = Counter()
        self._first: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, set[int]] = {}
        self._proved: set[tuple[Hashable, int]] = set()
        self._tries = 0
        self._failed = float("inf")  # the shortest length that the model could not run at

    def fit(
        self, batches: Sequence[Any], masks: Masks, run: Run, measure: Measure, *, room: bool
    ) -> tuple[tuple[Batch, ...], Masks] | None:
        """The micro-batches at the length that they run at, and their masks; None if they run as they came.
        `room`: whether a length can be recorded that was not so far. `run` and `measure`: for the proof."""
        if self._never:
            return None
        self.why = next(filter(None, map(why_not_padded, batches)), "")
        if self.why:
            return None
        kinds, lengths = tuple(map(kind_of, batches)), [length_of(batch) for batch in batches]
        recorded = self._recorded.setdefault(kinds, set())
        if not recorded and len(set(lengths)) == 1:
            self._first.setdefault(kinds, lengths[0])
        if all(length == self._first.get(kinds) for length in lengths):
            if _all_hide(masks):
                recorded.add(lengths[0])
            return None
        length = self._chosen(lengths, recorded, room)
        if length is None or not self._is_proved(kinds, batches, length, run, measure):
            return None
        recorded.add(length)
        # One recording takes every mask of that length: none of them is left out of it.
        hiding = tuple(tuple(None for _ in one) for one in masks)
        return tuple(padded(batch, length, self._token) for batch in batches), hiding

    def count(self, given: Sequence[Batch], fitted: Sequence[Batch]) -> None:
        """Count a step or call that ran with `fitted` for `given`."""
        before, after = (sum(batch["attention_mask"].numel() for batch in them) for them in (given, fitted))
        if after > before:
            self.counts.update(padded=1, given=before, added=after - before)

    def _chosen(self, lengths: Sequence[int], recorded: set[int], room: bool) -> int | None:
        fresh = {rounded_up(max(lengths), self._longest)} if room else set()
        # A length that is recorded comes before a fresh one, even if it is longer.
        for candidates in (recorded, fresh):
            fitting = [n for n in candidates if n < self._failed and fits(lengths, n)]
            if fitting:
                return min(fitting)
        self.why = self.reason or "no recorded length is a little longer, and no further one can be recorded"
        return None

    def _is_proved(
        self, kinds: tuple[Hashable, ...], batches: Sequence[Batch], length: int, run: Run, measure: Measure
    ) -> bool:
        kind, batch = min(zip(kinds, batches, strict=True), key=lambda both: length_of(both[1]))
        if length_of(batch) == length or (kind, length) in self._proved:
            return True
        try:
            why = why_padding_shows(self._model, batch, length, self._token, run, measure)
        except NothingProvedError as error:
            self.why, self._tries = str(error), self._tries + 1
            if self._tries == MOST_TRIES:
                self.reason, self._never = self.why, True
            return False
        except Exception as error:  # a model may raise anything at all
            self._failed = min(self._failed, length)
            self.why = self.reason = f"it could not run with {length} positions ({first_line(error)})"
            return False
        if why is not None:
            self.why = self.reason = why
            self._never = True
            return False
        self._proved.add((kind, length))
        return True


def rounded_up(length: int, longest: float) -> int:
    """The length that is recorded for batches of this one."""
    step = max(STEP, (1 << (length - 1).bit_length()) // 8)
    up = -(-length // step) * step
    return up if up <= longest else max(length, int(longest))


def fits(lengths: Sequence[int], length: int) -> bool:
    """Whether micro-batches of these lengths may run at one length: it is long enough, and adds little."""
    allowed = max(STEP * len(lengths), MOST_ADDED * sum(lengths))
    return max(lengths) <= length and sum(length - own for own in lengths) <= allowed


def _all_hide(masks: Masks) -> bool:
    return all(shape is None for one in masks for shape in one)
