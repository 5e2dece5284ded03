"""Measured times by problem: the table in the package, and what `fuseline tune` kept on this machine.

An entry is a problem and the microseconds of each candidate that ran it. A problem that was not measured is
judged by its neighbours: near in the logarithms of its sizes, and alike in its features.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuseline.ops.attention.problem import Problem

NEIGHBOURS = 5
FAR = 5.0
# What a difference counts in doublings of a size; measured times of such pairs differ about as much.
_PENALTIES = {
    "direction": 4.0,
    "causal": 1.0,
    "is_windowed": 2.0,
    "mask": 4.0,
    "mask_dims": 1.0,
    "is_packed": 6.0,
    "is_grouped": 1.0,
    "soft_cap": 1.0,
    "sinks": 0.5,
    "drops": 2.0,
    "lse": 0.5,
}


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
class Places:
    """Where problems stand: their sizes in doublings, and their features as numbers that are equal or not."""

    sizes: np.ndarray
    features: np.ndarray

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Places:
        return cls(
            np.array([_sizes(problem) for problem in problems]),
            np.array([_codes(problem) for problem in problems]),
        )

    def distances(self, problem: Problem) -> np.ndarray:
        """From `problem` to each: between their sizes, and the penalties of what they do not share."""
        sizes = np.sqrt(((self.sizes - np.array(_sizes(problem))) ** 2).sum(1))
        return sizes + (self.features != np.array(_codes(problem))) @ _WEIGHTS


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

    def neighbours(self, problem: Problem, able: Sequence[str]) -> list[tuple[float, Entry]]:
        """The nearest entries that know any of the `able` candidates, with their distances."""
        if not self.entries:
            return []
        apart = self._places.distances(problem)
        near: list[tuple[float, Entry]] = []
        for i in np.argsort(apart, kind="stable"):
            if apart[i] > FAR or len(near) == NEIGHBOURS:
                break
            entry = self._listed[i]
            if not entry.times_us.keys().isdisjoint(able):
                near.append((float(apart[i]), entry))
        return near

    @functools.cached_property
    def _listed(self) -> list[Entry]:
        return list(self.entries.values())

    @functools.cached_property
    def _places(self) -> Places:
        return Places.of([entry.problem for entry in self._listed])


def slowdowns(near: Sequence[tuple[float, Entry]], able: Sequence[str]) -> dict[str, float]:
    """For each of `able` that the neighbours know: its time over that of the fastest, as they saw it."""
    found: dict[str, float] = {}
    for name in able:
        weighed = [
            (1.0 / (0.05 + apart * apart), math.log(entry.times_us[name] / _best(entry, able)))
            for apart, entry in near
            if name in entry.times_us
        ]
        if weighed:
            total = sum(weight for weight, _ in weighed)
            found[name] = math.exp(sum(weight * log for weight, log in weighed) / total)
    return found


def distance(one: Problem, other: Problem) -> float:
    """How far apart two problems are, in doublings of a size."""
    return float(Places.of([other]).distances(one)[0])


def plain(problem: Problem) -> Problem:
    """The problem as tables know it: on a GPU whatever its number, asked for without determinism."""
    return replace(problem, device=torch.device(problem.device.type), deterministic=False)


def _best(entry: Entry, able: Sequence[str]) -> float:
    return min(time for name, time in entry.times_us.items() if name in able)


def _sizes(problem: Problem) -> tuple[float, ...]:
    T, S = problem.seqlen_q, problem.seqlen_k
    rows = problem.batch * problem.heads
    if problem.sequences:
        rows *= problem.sequences
        T, S = problem.max_seqlen_q, problem.max_seqlen_k
    seen = S
    if problem.window_left >= 0:
        right = max(problem.window_right, 0) if problem.causal == "none" else 0
        seen = min(S, problem.window_left + right + 1)
    return (
        math.log2(max(T, 1)),
        math.log2(max(S, 1)),
        0.7 * math.log2(max(rows, 1)),
        1.5 * math.log2(max(problem.head_dim, 1)),
        0.7 * math.log2(problem.heads / max(problem.kv_heads, 1)),
        0.5 * math.log2(max(seen, 1)),
    )


def _features(problem: Problem) -> dict[str, Any]:
    causal = problem.causal
    if causal != "none" and problem.is_square:
        causal = "square"
    return {
        "direction": problem.direction,
        "causal": causal,
        "is_windowed": problem.is_windowed,
        "mask": problem.mask,
        "mask_dims": problem.mask_dims,
        "is_packed": problem.sequences > 0,
        "is_grouped": problem.heads != problem.kv_heads,
        "soft_cap": problem.soft_cap,
        "sinks": problem.sinks,
        "drops": problem.dropout_p > 0,
        "lse": problem.lse,
    }


def _codes(problem: Problem) -> list[int]:
    """The features in the order of the penalties, and what must be the same at all."""
    features = _features(problem)
    never = (problem.dtype.itemsize, problem.device.type)
    return [hash(features[name]) for name in _PENALTIES] + [hash(never)]


_WEIGHTS = np.array([*_PENALTIES.values(), 1e9])


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
