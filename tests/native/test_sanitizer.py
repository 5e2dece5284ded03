"""Our kernels touch no memory that is not theirs, race for none and read none that was never written."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize(
    "program",
    [
        "sanitized.py",
        "sanitized_attention.py",
        "sanitized_layer.py",
        "sanitized_decode.py",
        "sanitized_optimizer.py",
    ],
)
def test_every_op_is_clean(program: str, tool: str) -> None:
    assert TOOL is not None
    # Only our own kernels: torch's are not ours to judge, and take most of the time.
    ours = ["--kernel-name", "kns=fuseline"]
    command = [TOOL, "--tool", tool, *ours, "--error-exitcode", "9", sys.executable, str(HERE / program)]
    if tool == "synccheck":
        # Large grids have more barriers than the tool follows by default, and it then ends the program: the
        # largest here have some 40,000.
        command[1:1] = ["--num-cuda-barriers", "131072"]
    if program in ("sanitized.py", "sanitized_decode.py") and tool == "racecheck":
        command.append("--racecheck")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
