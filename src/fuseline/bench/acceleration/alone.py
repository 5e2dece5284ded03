"""The process of one case (see `suite`): a job as JSON on stdin, records into the file that is named."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import torch

from fuseline.bench.acceleration.case import Case
from fuseline.bench.acceleration.contest import Observer
from fuseline.bench.acceleration.suite import AccelerationBench, run_case
from fuseline.records import append


def main() -> None:
    job = json.loads(sys.stdin.read())
    left, index = job.pop("left"), job.pop("index")
    deadline = math.inf if left is None else time.monotonic() + left
    bench = AccelerationBench(
        **{
            **job,
            "device": torch.device(job["device"]),
            "cases": tuple(job["cases"]),
            "peers": tuple(job["peers"]),
        }
    )
    append(Path(sys.argv[1]), run_case(bench, bench.found()[index], deadline, _told()))


def _told() -> Observer:
    """A line on stderr whenever another contender is made ready, and when the turns begin."""
    begin, before = time.monotonic(), ""

    def observe(case: Case, contender: str, phase: str) -> None:
        nonlocal before
        if (phase, before) != ("run", "run"):
            what = "timing" if phase == "run" else f"{phase} {contender}"
            print(f"{time.monotonic() - begin:6.1f} s  {case}: {what}", file=sys.stderr, flush=True)
        before = phase

    return observe


if __name__ == "__main__":
    main()
