"""One JSON file a validation: how far the run is, and how well it translates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fuseline.files.writing import write_json
from fuseline.training.metrics import METRICS, Entry, read_metrics

EPOCHS = "epochs"


class EpochFiles:
    """A writer of `epochs/epoch-0003.json`: the epoch, its mean training loss and learning tokens a second,
    and the figures of the validation. Entries already in the run's metrics count, so a resumed run goes
    on."""

    def __init__(self, folder: Path, steps_per_epoch: float) -> None:
        self._folder = folder / EPOCHS
        self._steps_per_epoch = steps_per_epoch
        self._losses: list[float] = []
        self._tokens_per_s: float | None = None
        metrics = folder / METRICS
        for entry in read_metrics(metrics) if metrics.exists() else ():
            self._take(entry, writing=False)

    def write(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._take(entry, writing=True)

    def close(self) -> None:
        """Nothing is held open between writes."""

    def _take(self, entry: Entry, *, writing: bool) -> None:
        if entry["kind"] == "step":
            if entry["loss"] is not None:  # infinite: JSON has no word for it
                self._losses.append(entry["loss"])
        elif entry["kind"] == "pace":
            self._tokens_per_s = entry["tokens_per_s"]
        elif entry["kind"] == "validation":
            if writing and entry["step"]:
                self._write(entry)
            self._losses = []

    def _write(self, entry: Entry) -> None:
        epoch = entry["step"] / self._steps_per_epoch
        figures = {
            "epoch": round(epoch, 3),
            "step": entry["step"],
            "training_loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "tokens_per_s": self._tokens_per_s,
            **{f"validation_{k}": v for k, v in entry.items() if k not in ("kind", "step", "best")},
            "best": entry["best"],
        }
        self._folder.mkdir(exist_ok=True)
        write_json(self._folder / f"epoch-{round(epoch):04}.json", figures)
