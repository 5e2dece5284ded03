"""The times of any problem on a GPU, as networks tell them that were fitted to times measured there.

Small networks (three layers of `features.numbers`) each give the logarithm of every candidate's time
over a floor; their mean counts. `fuseline bench attention --write-table` measures and fits. What lies outside
of what was measured is told as its nearest inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fuseline.ops.attention.features import floor_us, numbers
from fuseline.ops.attention.problem import Problem


@dataclass(frozen=True)
class Fitted:
    """names: the candidates, in the order of the networks' outputs. widths: by candidate the bytes of numbers
    it was measured with. problems: how many were measured. mean, scale, low, high: of the columns. offsets:
    of the outputs. layers: weights [networks, in, out] and biases [networks, 1, out] of each layer."""

    names: tuple[str, ...]
    widths: Mapping[str, tuple[int, ...]]
    problems: int
    mean: np.ndarray
    scale: np.ndarray
    low: np.ndarray
    high: np.ndarray
    offsets: np.ndarray
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]

    def estimate(self, problem: Problem, names: Sequence[str]) -> dict[str, float]:
        """Microseconds of those of `names` that were measured with numbers of that width."""
        width = problem.dtype.itemsize
        known = [name for name in names if width in self.widths.get(name, ())]
        if not known or problem.is_empty:
            return {}
        # New columns are appended: a file that was fitted before them reads its own.
        logs = self._outputs(np.array(numbers(problem)[: len(self.mean)]))
        floor = floor_us(problem)
        return {name: floor * float(np.exp(logs[self.names.index(name)])) for name in known}

    def _outputs(self, columns: np.ndarray) -> np.ndarray:
        x = ((np.clip(columns, self.low, self.high) - self.mean) / self.scale).astype(np.float32)[None, None]
        for i, (weight, bias) in enumerate(self.layers):
            x = x @ weight + bias
            if i + 1 < len(self.layers):
                x = x / (1 + np.exp(-x))
        found: np.ndarray = x[:, 0].mean(0) + self.offsets
        return found

    def save(self, file: Path) -> None:
        """Weights go in 16 bits."""
        arrays: dict[str, Any] = {
            "names": np.array(self.names),
            "widths": np.array([",".join(map(str, self.widths[name])) for name in self.names]),
            "problems": np.array(self.problems),
            **{name: getattr(self, name).astype(np.float32) for name in _COLUMNS},
        }
        for i, (weight, bias) in enumerate(self.layers):
            arrays[f"weight_{i}"] = weight.astype(np.float16)
            arrays[f"bias_{i}"] = bias.astype(np.float32)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as open_file:
            np.savez_compressed(open_file, **arrays)


_COLUMNS = ("mean", "scale", "low", "high", "offsets")


def load(file: Path) -> Fitted | None:
    """What `save` wrote; None where there is no such file."""
    if not file.exists():
        return None
    with np.load(file) as data:
        names = tuple(str(name) for name in data["names"])
        layers: list[tuple[np.ndarray, np.ndarray]] = []
        while f"weight_{len(layers)}" in data:
            i = len(layers)
            layers.append((data[f"weight_{i}"].astype(np.float32), data[f"bias_{i}"]))
        return Fitted(
            names=names,
            widths={
                name: tuple(int(n) for n in str(told).split(","))
                for name, told in zip(names, data["widths"], strict=True)
            },
            problems=int(data["problems"]),
            layers=tuple(layers),
            **{name: data[name] for name in _COLUMNS},
        )
