"""Where a run's figures go: JSON lines always, TensorBoard and Weights & Biases if asked."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fuseline.errors import InputError
from fuseline.files.json_lines import append_lines, split_lines
from fuseline.files.reading import is_there, read_bytes, reason
from fuseline.files.schema import checked_values, parse_json, shown
from fuseline.files.writing import write_atomically
from fuseline.training.checkpoint_schema import ENTRIES, EntrySaid

METRICS = "metrics.jsonl"
FILE_BYTES = 2**32

Entry = Mapping[str, Any]


class Writer(Protocol):
    """Takes entries `{"kind": ..., "step": ..., ...}`; `step` counts optimizer steps taken."""

    def write(self, entries: Sequence[Entry]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """Appends entries to a file, each batch of them whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        lines = "".join(json.dumps(_finite(entry), ensure_ascii=False) + "\n" for entry in entries)
        try:
            append_lines(self.path, lines)
        except OSError as error:
            raise InputError(
                f"Could not write {self.path}: {reason(error)}. It is as it was before this step; free some "
                "space, then resume."
            ) from error

    def close(self) -> None:
        """Nothing is held open between writes."""


class TensorBoard:
    """Scalars and samples as TensorBoard event files, those after `step` replaced."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            for name, value in _figures(entry).items():
                self._events.add_scalar(name, value, entry["step"])
            if entry["kind"] == "sample":
                self._events.add_text("sample", entry["text"], entry["step"])

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases:
    """Figures to a Weights & Biases project."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project=project, dir=str(folder), config=dict(config), name=folder.name)

    def write(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._run.log(_figures(entry), step=entry["step"])

    def close(self) -> None:
        self._run.finish()


def check_installed(packages: Iterable[str]) -> None:
    """`InputError` for the first of `packages`, named as their extras are, that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"{package} is asked for and not installed: pip install 'fuseline[{package}]', "
                "or leave the option out."
            )


def cut_back(path: Path, step: int) -> None:
    """Drop the entries after `step`, and a last line cut off by a crash: the run takes them anew."""
    if not is_there(path):
        return
    kept = [line for line, entry in _entries(path) if entry["step"] <= step]
    write_atomically(path, lambda file: file.write(b"".join(line + b"\n" for line in kept)))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All entries of a run's metrics file, in order; `InputError`, naming the line, for what is no entry."""
    return [entry for _, entry in _entries(path)]


def _entries(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    found = []
    lines, _ = split_lines(read_bytes(path, FILE_BYTES))
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        entry = parse_json(line, place)
        if not isinstance(entry, dict):
            raise InputError(f"{place} is not an entry of a run: {shown(entry)}.")
        checked_values(ENTRIES.get(str(entry.get("kind")), EntrySaid), entry, place)
        found.append((line, entry))
    return found


def _figures(entry: Entry) -> dict[str, float]:
    return {
        f"{entry['kind']}/{name}": value
        for name, value in entry.items()
        if name != "step" and isinstance(value, (int, float))
    }


def _finite(entry: Entry) -> dict[str, Any]:
    """JSON has no infinity and no NaN: they become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in entry.items()
    }
