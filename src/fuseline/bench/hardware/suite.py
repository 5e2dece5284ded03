"""The parts of the suite in order, their records written as each is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuseline import native
from fuseline.bench.hardware import bandwidth, calls, latency, matrix, roofline
from fuseline.bench.hardware.figure import SUITE, Figure, skipped
from fuseline.bench.hardware.probes import load_probes
from fuseline.errors import InputError, unknown_name
from fuseline.records import Record, append, describe

PARTS = ("bandwidth", "matrix", "latency", "calls", "examples", "ops")

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, parts done, and parts in all."""


@dataclass(frozen=True)
class HardwareBench:
    """Which parts to measure, on what."""

    device: torch.device
    parts: tuple[str, ...] = PARTS
    seed: int = 1337

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise unknown_name("part", part, PARTS)


def run(bench: HardwareBench, out: Path, observe: Observer) -> list[Record]:
    """Measure the parts; records are appended to `<out>/hardware.jsonl` part by part."""
    native.ready(bench.device.type)
    records: list[Record] = []
    parts = [part for part in PARTS if part in bench.parts]
    for number, part in enumerate(parts):
        observe(part, number, len(parts))
        figures = list(_measure(part, bench.device, bench.seed))
        environment = describe(bench.device)
        new = [figure.record(environment) for figure in figures]
        append(out / f"{SUITE}.jsonl", new)
        records += new
    observe("done", len(parts), len(parts))
    return records


def _measure(part: str, device: torch.device, seed: int) -> Iterator[Figure]:
    if part == "matrix":
        return matrix.measure(device, seed)
    if part == "ops":
        return roofline.measure_ops(device, seed)
    try:
        probes: Any = load_probes()
    except InputError as error:
        return iter([skipped(part, "probes", str(error))])
    if part == "bandwidth":
        return bandwidth.measure(device, probes, seed)
    if part == "latency":
        return latency.measure(device, probes, seed)
    if part == "calls":
        return calls.measure(device, probes)
    return roofline.measure_examples(device, probes, seed)
