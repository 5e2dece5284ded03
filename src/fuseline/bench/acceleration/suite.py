"""All cases, one after another; where there are several on a GPU, each in a process of its own.

An error that breaks the device (an illegal access, memory that is never given back) then costs one case.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline.bench.acceleration.case import Case, find_cases
from fuseline.bench.acceleration.contenders import DEFAULTS, check_names
from fuseline.bench.acceleration.contest import OUT_OF_TIME, Observer, Settings, close, hold
from fuseline.bench.acceleration.models import DTYPES
from fuseline.bench.acceleration.results import records_of, refusals
from fuseline.errors import InputError, unknown_name
from fuseline.records import Record, append, describe, read

ALONE = "fuseline.bench.acceleration.alone"


@dataclass(frozen=True)
class AccelerationBench:
    """What to time. `seconds` and `rounds` are those of `Settings`; `budget_s` bounds the whole run: what has
    found no time by then is refused. `apart`: each case in a process of its own. `drawn`: cases at so many
    lengths from `seed` besides."""

    device: torch.device
    cases: tuple[str, ...] = ()
    preset: str = "full"
    dtype: str = "bf16"
    peers: tuple[str, ...] = DEFAULTS
    seconds: float = 10.0
    rounds: int = 10
    budget_s: float = math.inf
    seed: int = 1337
    apart: bool = False
    drawn: int = 0

    def __post_init__(self) -> None:
        check_names(self.peers)
        self.found()
        if self.dtype not in DTYPES:
            raise unknown_name("precision", self.dtype, DTYPES)
        if not 0 < self.seconds < math.inf:
            raise InputError(f"--seconds {self.seconds:g}: a time needs some, and an end.")
        if self.rounds < 1:
            raise InputError(f"--rounds {self.rounds}: each peer needs a turn.")

    def found(self) -> tuple[Case, ...]:
        """The cases, those at drawn lengths last."""
        return find_cases(self.cases, self.preset, self.drawn, self.seed)

    @property
    def contenders(self) -> tuple[str, ...]:
        return check_names(self.peers)

    @property
    def settings(self) -> Settings:
        return Settings(self.device, self.dtype, self.seconds, self.rounds, self.seed)


def run(bench: AccelerationBench, file: Path, observe: Observer) -> list[Record]:
    """Time every case; returns the records, which `file` gets case by case."""
    end = time.monotonic() + bench.budget_s
    cases = bench.found()
    records: list[Record] = []
    for index, case in enumerate(cases):
        now = time.monotonic()
        left = (end - now) / (len(cases) - index)
        if left <= 0:
            new = _refused(bench, case, OUT_OF_TIME)
        elif bench.apart:
            new = _in_another_process(bench, index, case, left)
        else:
            new = run_case(bench, case, now + left, observe)
        append(file, new)
        records += new
    return records


def run_case(bench: AccelerationBench, case: Case, deadline: float, observe: Observer) -> list[Record]:
    """The records of one case."""
    contest = hold(case, bench.contenders, bench.settings, observe, deadline=deadline)
    try:
        return records_of(case, bench.dtype, contest, describe(bench.device))
    finally:
        close(contest)


def _in_another_process(bench: AccelerationBench, index: int, case: Case, left: float) -> list[Record]:
    job = {
        "device": str(bench.device),
        "index": index,
        "cases": bench.cases,
        "drawn": bench.drawn,
        "preset": bench.preset,
        "dtype": bench.dtype,
        "peers": bench.peers,
        "seconds": bench.seconds,
        "rounds": bench.rounds,
        "seed": bench.seed,
        "left": None if math.isinf(left) else left,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.jsonl"
        command = [sys.executable, "-m", ALONE, str(file)]
        ended = subprocess.run(command, input=json.dumps(job), stdout=sys.stderr, text=True, check=False)
        if ended.returncode == 0 and file.exists():
            return read(file)
    return _refused(bench, case, f"its process ended with code {ended.returncode} and no times")


def _refused(bench: AccelerationBench, case: Case, reason: str) -> list[Record]:
    named = dict.fromkeys(bench.contenders, reason)
    return refusals(case.as_record(bench.dtype), named, describe(bench.device))
