"""Half a minute of the fuzz of ops, and that it would find what is wrong. The other half minute is that of
test_files_and_kills.py."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .judged import judge, judge_same
from .suite import Suite, Trial

RUN = Path(__file__).parent / "run.py"
BUDGET_S = 30


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_half_a_minute_of_it_holds(device: str, tmp_path: Path) -> None:
    tally = tmp_path / "tally"
    line = ("ops", "attention", "--seconds", str(BUDGET_S), "--seed", "26", "--device", device)
    ended = run(*line, "--tally", str(tally))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["ops", "attention"]
    assert all("no failures" in line for line in lines)
    assert tally.read_text().splitlines() == lines


def test_one_case_is_the_same_wherever_it_is_asked_for() -> None:
    first = run("ops", "--seed", "7", "--only", "12")
    assert first.returncode == 0, first.stderr
    trial, says = first.stdout.splitlines()
    assert says == "holds"
    assert run("ops", "--trial", trial).stdout == first.stdout


def test_a_failure_is_cut_down_and_exits_with_1() -> None:
    broken = '{"op":"softmax","shape":[2,3],"options":{"dim":9},"dtype":"float32","device":"cpu","seed":1,'
    ended = run("ops", "--trial", broken + '"specials":{},"layouts":{},"wanted":[],"incoming":"drawn"}')
    assert ended.returncode == 1
    assert "IndexError" in ended.stdout


def numbers() -> Suite:
    """Cases are lists of numbers; those that hold a 7 are wrong."""

    def simpler(trial: Trial) -> Iterator[Trial]:
        held = trial["held"]
        for i in range(len(held)):
            yield {"held": [*held[:i], *held[i + 1 :]]}

    return Suite(
        "numbers",
        "",
        draw=lambda pick, device: {"held": [pick.randrange(10) for _ in range(8)]},
        check=lambda trial: "value: 7" if 7 in trial["held"] else None,
        simpler=simpler,
    )


def test_finds_the_smallest_case() -> None:
    suite = numbers()
    failing = [t for n in range(50) if suite.complaint(t := suite.trial(0, n, "cpu")) is not None]
    assert failing
    assert all(suite.smallest(trial) == {"held": [7]} for trial in failing)
    assert suite.trial(3, 5, "cpu") == suite.trial(3, 5, "cpu") != suite.trial(3, 6, "cpu")


DYING = """
import math, os, sys
sys.path.insert(0, sys.argv[1])
from side_by_side import Share, side_by_side
from suite import Suite

def check(trial):
    if trial["drawn"] == 7:
        os.kill(os.getpid(), 9)
    return "value: 9" if trial["drawn"] == 9 else None

def find(name):
    return Suite(name, "", draw=lambda pick, device: {"drawn": pick.randrange(12)}, check=check)

if __name__ == "__main__":
    drawn = [find("dying").trial(0, n, "cpu")["drawn"] for n in range(40)]
    share = Share(0, "cpu", 0, 40, 1, math.inf, 30)
    print(drawn.count(7), drawn.count(9), *side_by_side(find, "dying", share, 2))
"""


def test_cases_that_end_their_process_are_failures_and_the_rest_is_done(tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    ended = subprocess.run(
        [sys.executable, str(script), str(RUN.parent)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    *lines, last = ended.stdout.splitlines()
    deaths, wrong, done, failures = map(int, last.split())
    assert deaths
    assert wrong
    assert (done, failures) == (40, deaths + wrong)
    assert sum("its process ended with -9" in line for line in lines) == deaths
    assert sum("fails: value: 9" in line for line in lines) == wrong


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to run on")
def test_processes_that_cannot_begin_end_the_run() -> None:
    ended = run("ops", "--device", "cuda", "--jobs", "2", "--cases", "4")
    assert ended.returncode == 1
    assert "ops: a process ended with 1 before its first case." in ended.stderr
    assert not ended.stdout


def test_an_exception_is_a_failure() -> None:
    suite = Suite("raises", "", draw=lambda pick, device: {}, check=lambda trial: str(1 // len(trial)))
    assert "ZeroDivisionError" in str(suite.complaint(suite.draw(random.Random(0), "cpu")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_judge_knows_right_from_wrong(dtype: torch.dtype) -> None:
    exact = torch.randn(64, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = exact.to(dtype)
    assert judge(plain, plain, exact, dtype=dtype) is None
    for wrong in (plain * 1.1, plain * 0, torch.where(plain > 2, 0, plain)):
        assert "error" in str(judge(wrong, plain, exact, dtype=dtype))
    assert "and the reference" in str(judge(plain[1:], plain, exact, dtype=dtype))
    for odd in (math.nan, math.inf):
        poisoned = plain.clone()
        poisoned[3, 4] = odd
        assert "at [3, 4]" in str(judge(poisoned, plain, exact, dtype=dtype))
        assert "at [3, 4]" in str(judge(plain, poisoned, poisoned.double(), dtype=dtype))
        assert judge(plain, poisoned, poisoned.double(), dtype=dtype, is_finite=True) is None
    assert judge_same(plain, plain.clone()) is None
    assert judge_same(plain, plain * 1.1) is not None
