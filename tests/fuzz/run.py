"""The fuzz: random cases of bad will, checked against what must hold, reproducible by a seed.

    python tests/fuzz/run.py --jobs 2                         every suite, as many cases as each one says
    python tests/fuzz/run.py ops --cases 1000                 one suite
    python tests/fuzz/run.py --seconds 60                     as many cases as fit, shared among the suites
    python tests/fuzz/run.py ops --device cuda --seed 7 --jobs 16     in 16 processes
    python tests/fuzz/run.py ops --tally FILE                 how far it is, in FILE every few seconds
    python tests/fuzz/run.py ops --seed 7 --only 1234         one case of a run
    python tests/fuzz/run.py ops --trial '{"op":"softmax",..}'  one case as a failure prints it

`make fuzz ARGS="..."` is the same; `make fuzz` alone is every suite (100,000 cases of ops, 5,000 of
attention, 1,000 files, 200 kills) and then every write on a full disk (tests/cli/test_full_disk.py).

A failure prints its seed and number, the smallest case that still fails, and what is wrong with that. With
several jobs a case that ends its process or hangs is a failure like any other, and another process goes on
behind it. Exit code 0: every case held; 1: some did not.

A new suite is a module with a `SUITE` (suite.py says what that is), and its line in SUITES.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "ops"))  # drawn_cases, which the tests share

import attention_cases
import kills
import op_cases
from side_by_side import Share, run_share, side_by_side
from suite import Suite, written

import files

SUITES: dict[str, Suite] = {
    suite.name: suite for suite in (op_cases.SUITE, attention_cases.SUITE, files.SUITE, kills.SUITE)
}

MOST_FAILURES = 20


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    suites = [SUITES[name] for name in options.suites or SUITES]
    if options.trial is not None:
        return _one(suites[0], json.loads(options.trial))
    if options.only is not None:
        return _one(suites[0], suites[0].trial(options.seed, options.only, options.device))
    seconds = math.inf if options.seconds is None else options.seconds / len(suites)
    failures = sum(_run(suite, options, seconds) for suite in suites)
    return 1 if failures else 0


def find(name: str) -> Suite:
    return SUITES[name]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = "; ".join(f"{suite.name}: {suite.summary}" for suite in SUITES.values())
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], metavar="SUITE", help=kinds)
    parser.add_argument("--cases", type=int, default=None, help="cases of each suite (default: its own)")
    parser.add_argument("--seconds", type=float, default=None, help="time for all, instead of a count")
    parser.add_argument("--seed", type=int, default=0, help="which cases are drawn")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases of a suite")
    parser.add_argument("--tally", type=Path, default=None, help="a file that holds the counts so far")
    parser.add_argument("--only", type=int, default=None, help="this case alone")
    parser.add_argument("--trial", default=None, help="this case alone, as a failure printed it")
    return parser.parse_args()


def _one(suite: Suite, trial: dict[str, object]) -> int:
    suite.prepare(str(trial.get("device", "cpu")))
    complaint = suite.complaint(trial)
    print(f"{written(trial)}\n{complaint or 'holds'}")
    return 0 if complaint is None else 1


def _run(suite: Suite, options: argparse.Namespace, seconds: float) -> int:
    """Run one suite, print what fails and a last line with counts. Returns the number of failures."""
    if options.jobs == 1:
        suite.prepare(options.device)
    began = time.monotonic()
    most = options.cases or (suite.cases if math.isinf(seconds) else sys.maxsize - options.first)
    first, until = options.first, began + seconds
    share = Share(options.seed, options.device, first, first + most, 1, until, MOST_FAILURES)
    tally = _Tally(suite, options, began)
    if options.jobs > 1:
        done, failures = side_by_side(find, suite.name, share, options.jobs, tally.tell)
    else:
        done, failures = 0, 0
        for _, said in run_share(suite, share):
            done += 1
            if said is not None:
                failures += 1
                print(said, flush=True)
            tally.tell(done, failures)
    stopped = " (stopped there)" if failures >= MOST_FAILURES else ""
    print(f"{tally.line(done, failures)}{stopped}", flush=True)
    tally.keep(done, failures)
    return failures


class _Tally:
    """The counts of a suite, also in a file while it runs: a run that is cut off has them."""

    EVERY_S = 3.0

    def __init__(self, suite: Suite, options: argparse.Namespace, began: float) -> None:
        self._name, self._options = suite.name, options
        self._began = self._kept = began
        path: Path | None = options.tally
        self._before = path.read_text() if path is not None and path.exists() else ""

    def line(self, done: int, failures: int) -> str:
        return (
            f"{self._name}: {done:,} cases on {self._options.device} from seed {self._options.seed} in "
            f"{time.monotonic() - self._began:.0f} s, {failures or 'no'} failure{'s' * (failures != 1)}"
        )

    def tell(self, done: int, failures: int) -> None:
        if time.monotonic() - self._kept > self.EVERY_S:
            self.keep(done, failures)

    def keep(self, done: int, failures: int) -> None:
        """Write the line behind those of earlier suites and runs."""
        if self._options.tally is not None:
            self._options.tally.write_text(f"{self._before}{self.line(done, failures)}\n")
            self._kept = time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
