"""What a suite of the fuzz is: it draws cases from a seed, checks one, and makes a failing one smaller."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Trial = dict[str, Any]
"""A case in full, as JSON holds it: what is checked depends on it and on nothing else."""


@dataclass(frozen=True)
class Suite:
    """One kind of cases.

    `draw(pick, device)` gives a trial. `check(trial)` returns what is wrong with it, None if nothing is.
    `simpler(trial)` gives trials with a little less to them, the boldest cuts first: a failing one is
    replaced by the first of them that fails too, until none does. `prepare(device)` is called before all.
    `cases` are as many as are drawn where no count is given.
    """

    name: str
    summary: str
    draw: Callable[[random.Random, str], Trial]
    check: Callable[[Trial], str | None]
    simpler: Callable[[Trial], Iterator[Trial]] = lambda trial: iter(())
    prepare: Callable[[str], None] = lambda device: None
    cases: int = 1000

    def trial(self, seed: int, number: int, device: str) -> Trial:
        """Case `number` of a seed: the same wherever it is asked for."""
        return self.draw(random.Random(f"{self.name} {seed} {number}"), device)

    def complaint(self, trial: Trial) -> str | None:
        """What `check` says; an exception that it lets out is a failure as well."""
        try:
            return self.check(trial)
        except Exception as error:  # whatever it is, it is what this looks for
            return f"{type(error).__name__}: {error}".splitlines()[0]

    def smallest(self, trial: Trial, tries: int = 400, until: float = math.inf) -> Trial:
        """A failing trial, cut down as far as it still fails in the same way, and as time is left until
        `until` by `time.monotonic`."""
        kind = _kind(self.complaint(trial))
        while True:
            for other in self.simpler(trial):
                tries -= 1
                if tries < 0 or time.monotonic() > until:
                    return trial
                if _kind(self.complaint(other)) == kind:
                    trial = other
                    break
            else:
                return trial


def _kind(complaint: str | None) -> str | None:
    """What failed, or the type of the exception."""
    return complaint and complaint.split(":")[0]


def written(trial: Trial) -> str:
    """A trial as one line that `--trial` takes."""
    return json.dumps(trial, separators=(",", ":"))
