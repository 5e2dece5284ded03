"""A training run as records: what it reached, how fast it went, and the loss as it fell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fuseline.files.writing import write_atomically
from fuseline.records import Environment, Record, describe
from fuseline.records.record import Scalar
from fuseline.timing import summarize
from fuseline.training.checkpoint import LATEST, peek
from fuseline.training.config import TrainConfig
from fuseline.training.metrics import METRICS, read_metrics

SUITE = "quality"
RECORDS = Path("records") / f"{SUITE}.jsonl"  # in the run's folder; `fuseline report` takes its folder
CURVE_POINTS = 100
SPEED = ("tokens_per_s", "mfu", "data_wait_share")


def run_records(folder: Path, environment: Environment) -> list[Record]:
    """What the run in `folder` has measured so far; it was made in `environment`.

    Speed is the median over the run's paces, the first left out (it has the warm-up in it). Raises
    `InputError` if there is no run in `folder`.
    """
    config, step = peek(folder / LATEST)
    entries = read_metrics(folder / METRICS)
    case = {**_case(config), "steps": step}

    def record(metric: str, value: float | None, case: Mapping[str, Scalar], **interval: Any) -> Record:
        return Record.of(SUITE, case, metric, value, environment, **interval)

    validations = [e for e in entries if e["kind"] == "validation" and e["loss"] is not None]
    paces = [e for e in entries if e["kind"] == "pace"]
    made = []
    if validations:
        best = min(validations, key=lambda e: e["loss"])
        made.append(record("validation_loss", best["loss"], {**case, "best_step": best["step"]}))
    for metric in SPEED:
        values = [e[metric] for e in paces[1:] if e[metric] is not None]
        if values:
            told = summarize(values)
            made.append(record(metric, told.median, case, low=told.low, high=told.high, n=told.n))
    peaks = [e["peak_memory_gib"] for e in paces if e["peak_memory_gib"] is not None]
    if peaks:
        made.append(record("peak_memory_gib", max(peaks), case))
    curve = {**case, "section": "curve"}
    for metric, points in (("loss", _thinned(paces)), ("validation_loss", validations)):
        made += [record(metric, e["loss"], {**curve, **_place(e)}) for e in points]
    return made


def write_run_records(folder: Path, device: torch.device) -> Path:
    """Write the records of the run in `folder`, made on `device`, beside it; returns their file."""
    lines = "".join(record.to_json() + "\n" for record in run_records(folder, describe(device)))
    path = folder / RECORDS
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, lambda file: file.write(lines.encode()))
    return path


def _place(entry: Mapping[str, Any]) -> dict[str, Scalar]:
    """Where on a curve: the step, and the seconds of training if they were written down."""
    seconds = entry.get("seconds")
    return {"step": entry["step"], **({} if seconds is None else {"training_s": round(seconds, 2)})}


def _case(config: TrainConfig) -> dict[str, Scalar]:
    return {
        "model": "gpt",
        "data": Path(config.data).stem,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "embed_dim": config.embed_dim,
        "batch": config.batch_size * config.accumulation,
        "seqlen_q": config.block_size,
        "dropout": config.dropout,
        "dtype": config.precision,
        "backend": config.attention,
        "norm": config.norm,
        "loss": config.loss,
        "execution": config.execution,
        "deterministic": config.deterministic,
        "seed": config.seed,
    }


def _thinned(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most `CURVE_POINTS` of the entries that have a loss, evenly spread, the last among them."""
    found = [entry for entry in entries if entry["loss"] is not None]
    step = max(1, -(-len(found) // CURVE_POINTS))
    return list(reversed(found[::-1][::step]))
