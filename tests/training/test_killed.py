"""A run killed with SIGKILL and resumed is, bit for bit, the run that was never stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fuseline.training.config import TrainConfig
from fuseline.training.metrics import METRICS
from fuseline.training.train import train

Make = Callable[..., Any]

PROGRAM = """
import json, sys, torch
from pathlib import Path
from fuseline.training.config import TrainConfig
from fuseline.training.train import train
torch.set_num_threads(1)
train(TrainConfig(**json.loads(sys.argv[1])), folder=Path(sys.argv[2]), device=sys.argv[3])
"""


def assert_killed_is_whole(config: TrainConfig, folder: Path, device: str, course: Make) -> None:
    """Train in another process, kill it at some moment, go on here for a few steps; compare with a run of as
    many steps that was left alone."""
    killed, whole = folder / "killed", folder / "whole"
    endless = json.dumps(asdict(replace(config, steps=10**6)))
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, endless, str(killed), device])
    metrics = killed / METRICS
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
        assert child.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline, "the run did not begin"
        time.sleep(0.002)
    time.sleep(random.random() * 0.3)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    lines = metrics.read_bytes().splitlines(keepends=True)
    last = json.loads(lines[-1] if lines[-1].endswith(b"\n") else lines[-2])
    config = replace(config, steps=last["step"] + 10)
    train(config, folder=killed, device=device, resume=True)
    train(config, folder=whole, device=device)
    assert course(killed) == course(whole)


def test_on_a_cpu(small: Make, course: Make, tmp_path: Path) -> None:
    config = small(log_interval=1, eval_interval=20, checkpoint_interval=3, sample_interval=0)
    assert_killed_is_whole(config, tmp_path, "cpu", course)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("execution", ["eager", "graph", "inductor", "inductor-graph", "reduce-overhead"])
def test_on_a_gpu(small: Make, course: Make, tmp_path: Path, execution: str) -> None:
    config = small(
        log_interval=1,
        eval_interval=20,
        checkpoint_interval=3,
        sample_interval=0,
        embed_dim=64,
        batch_size=16,
        precision="bf16",
        execution=execution,
        deterministic=True,
    )
    assert_killed_is_whole(config, tmp_path, "cuda", course)
