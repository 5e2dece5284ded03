"""The largest batch a rung can train with on this GPU: a line through two measured sizes, then a trial.

Peak memory grows linearly with the batch: weights, gradients and moments do not depend on it, activations are
proportional to it. The trial runs in a process of its own, where nothing else holds memory and running out of
it breaks nothing.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fuseline.bench.ladder.spec import RunSpec

PROBE = "fuseline.bench.ladder.max_batch_probe"
# The allocator cannot use every byte it holds; what is lost to fragmentation varies from run to run.
USABLE = 0.97
# Eager trials take seconds; a compiled one compiles anew for each size.
TRIALS = {False: 6, True: 2}


@dataclass(frozen=True)
class Largest:
    """`batch` sequences, None where none could be found, with the `reason`. `sizes` were measured."""

    batch: int | None
    verified: bool
    sizes: int
    reason: str = ""


def predict(peaks: Mapping[int, float], capacity_gib: float) -> int | None:
    """The largest batch that a line through the measured `peaks` (GiB by batch) puts under `capacity_gib`;
    None with fewer than two sizes, or where more sequences did not take more memory."""
    if len(peaks) < 2:
        return None
    small, large = min(peaks), max(peaks)
    slope = (peaks[large] - peaks[small]) / (large - small)
    if slope <= 0:
        return None
    return max(0, math.floor(small + (capacity_gib * USABLE - peaks[small]) / slope))


def verify(spec: RunSpec, peaks: Mapping[int, float], device: str, seed: int, *, seconds: float) -> Largest:
    """Measure what is missing of two sizes, predict, and try the prediction (and a little less, if it does
    not fit), all in a process of its own that has `seconds` for it."""
    job = {
        "spec": asdict(spec),
        "peaks": {str(b): p for b, p in peaks.items()},
        "device": device,
        "seed": seed,
    }
    try:
        ended = subprocess.run(
            [sys.executable, "-m", PROBE],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Largest(None, False, len(peaks), f"the trial was not through after {seconds:.0f} s")
    lines = ended.stdout.strip().splitlines()
    if ended.returncode != 0 or not lines:
        said = ended.stderr.strip().splitlines()
        return Largest(None, False, len(peaks), f"the trial failed: {said[-1] if said else ended.returncode}")
    return Largest(**json.loads(lines[-1]))
