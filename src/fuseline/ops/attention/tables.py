"""Measured times by problem: the table in the package, and what `fuseline tune` kept on this machine.

An entry is a problem and the microseconds of each candidate that ran it. `estimate.py` says what they tell of
a problem that was not measured.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuseline.ops.attention.estimate import Estimator
from fuseline.ops.attention.problem import Problem

FAR = 8.0


@dataclass(frozen=True)
class Entry:
    """One measured problem: microseconds by candidate."""

    problem: Problem
    times_us: Mapping[str, float]

    @property
    def fastest(self) -> str:
        return min(self.times_us, key=lambda name: self.times_us[name])

    def to_json(self) -> dict[str, Any]:
        """Fields that are not the default (the device: a GPU), and the times."""
        found: dict[str, Any] = {}
        for entry in fields(Problem):
            value = getattr(self.problem, entry.name)
            if entry.name in ("device", "deterministic") or value == entry.default:
                continue
            found[entry.name] = _name(value) if isinstance(value, torch.dtype) else value
        if self.problem.device.type != "cuda":
            found["device"] = self.problem.device.type
        return {**found, "times_us": {name: round(time, 3) for name, time in self.times_us.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        found = {name: value for name, value in data.items() if name != "times_us"}
        found["dtype"] = getattr(torch, found["dtype"])
        device = torch.device(found.pop("device", "cuda"))
        return cls(Problem(device=device, **found), dict(data["times_us"]))


@dataclass(frozen=True)
class Table:
    """Entries by their problem, in the form of `plain`."""

    entries: Mapping[Problem, Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Table:
        """Later entries of a problem complete and replace the times of earlier ones."""
        found: dict[Problem, Entry] = {}
        for entry in entries:
            key = plain(entry.problem)
            before = found[key].times_us if key in found else {}
            found[key] = Entry(key, {**before, **entry.times_us})
        return cls(found)

    def find(self, problem: Problem) -> Entry | None:
        return self.entries.get(plain(problem))

    def nearest(self, problem: Problem) -> tuple[float, Entry] | None:
        """The nearest entry and how far it is; None where none is within reach."""
        if not self.entries:
            return None
        apart = self.estimator.points.distances(problem)
        i = int(np.argmin(apart))
        return None if apart[i] > FAR else (float(apart[i]), self._listed[i])

    def with_(self, others: Table) -> Table:
        """These entries, completed and replaced by `others`."""
        return Table.of([*self.entries.values(), *others.entries.values()])

    @functools.cached_property
    def _listed(self) -> list[Entry]:
        return list(self.entries.values())

    @functools.cached_property
    def estimator(self) -> Estimator:
        return Estimator(
            tuple(entry.problem for entry in self._listed), tuple(entry.times_us for entry in self._listed)
        )


def plain(problem: Problem) -> Problem:
    """The problem as tables know it: on a GPU whatever its number, asked for without determinism. With as
    many keys as queries both ends that causality may be aligned with are one."""
    is_one = problem.causal == "top_left" and problem.is_square and not problem.sequences
    return replace(
        problem,
        device=torch.device(problem.device.type),
        deterministic=False,
        causal="bottom_right" if is_one else problem.causal,
    )


def read_entries(file: Path) -> list[Entry]:
    """The entries of a table's file; none where it is not there."""
    if not file.exists():
        return []
    return [Entry.from_json(data) for data in json.loads(file.read_text())["entries"]]


def as_text(entries: Iterable[Entry], about: Mapping[str, str]) -> str:
    """A table's file: what it is about, and a line for each entry."""
    lines = ",\n".join(f"  {json.dumps(entry.to_json())}" for entry in entries)
    return f'{{"about": {json.dumps(dict(about))},\n "entries": [\n{lines}\n]}}\n'


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
