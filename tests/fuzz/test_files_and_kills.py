"""Half a minute of damaged files and of kills, and that they would find what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def ran(suite: str, *arguments: str) -> str:
    """What a suite says, in a process without pytest's threads: it forks."""
    ended = subprocess.run(
        [sys.executable, str(HERE / "run.py"), suite, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.parametrize("suite,cases", [("files", "60"), ("kills", "10")])
def test_a_sample_of_it_holds(suite: str, cases: str) -> None:
    assert "no failures" in ran(suite, "--seed", "26", "--cases", cases, "--seconds", "15")


def test_a_crash_a_hang_and_a_traceback_are_found(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
from apart import apart
room = Path({str(tmp_path)!r})
def crash(): os.abort()
def hang(): time.sleep(100); return 0
def spin():
    while True: pass
def trace(): raise KeyError("x")
def hoard(): return len(bytearray(2**40))
def fine(): print("fuseline: no", file=sys.stderr); return 2
import json
ended = [apart(work, room, patience_s=0.5) for work in (crash, hang, spin, trace, hoard, fine)]
print(json.dumps([[e.code, e.crashed] for e in ended]))
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    crash, hang, spin, trace, hoard, fine = json.loads(said)
    assert crash == [-6, "ended by signal SIGABRT"]
    assert hang == spin == [-14, "ended by signal SIGALRM"]
    assert trace[1] == "traceback: KeyError: 'x'"
    assert "MemoryError" in hoard[1]
    assert fine == [2, None]
