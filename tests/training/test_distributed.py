"""Two processes on one CPU, through torchrun and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.cli.train_options import FLAGS
from fuseline.training.distributed import Group
from fuseline.training.train import train

Make = Callable[..., Any]


def torchrun(
    processes: int, config: Any, folder: Path, *more: str, device: str = "cpu"
) -> subprocess.CompletedProcess[str]:
    options = [
        word
        for name, value in asdict(config).items()
        if value is not None
        for word in (f"--{FLAGS.get(name, name).replace('_', '-')}", str(value))
        if name not in ("tensorboard", "wandb")
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "fuseline", "train", "gpt", "--device", device, "--out", str(folder), *options, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        out, err = child.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        child.terminate()  # torchrun then ends the processes that it started
        child.communicate(timeout=60)
        raise
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def test_two_processes_learn_what_one_does_and_one_writes(small: Make, course: Make, tmp_path: Path) -> None:
    ours = {"norm": "fuseline", "loss": "fuseline-linear"}
    config = small(
        steps=8, dropout=0.0, accumulation=4, eval_interval=4, precision="fp32", execution="eager", **ours
    )
    alone = train(config, folder=tmp_path / "one")
    done = torchrun(2, config, tmp_path / "two", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # one object: the second process printed nothing
    assert result["step"] == 8
    assert result["validation_loss"] == pytest.approx(alone.validation_loss, rel=1e-5)
    one, two = (
        [(e["kind"], e["step"], e["loss"]) for e in course(tmp_path / n) if "loss" in e]
        for n in ("one", "two")
    )
    assert [entry[:2] for entry in two] == [entry[:2] for entry in one]
    assert [loss for _, _, loss in two] == pytest.approx([loss for _, _, loss in one], rel=1e-5)
    # The number of processes may change on the way.
    went_on = train(small(**{**asdict(config), "steps": 10}), folder=tmp_path / "two", resume=True)
    longer = train(small(**{**asdict(config), "steps": 10}), folder=tmp_path / "one", resume=True)
    assert went_on.loss == pytest.approx(longer.loss, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("execution", ["eager", "inductor"])
def test_two_gpus_learn_what_one_does(small: Make, course: Make, tmp_path: Path, execution: str) -> None:
    config = small(steps=8, dropout=0.0, accumulation=4, precision="fp32", execution=execution)
    done = torchrun(2, config, tmp_path / "two", "--json", device="cuda")
    assert done.returncode == 0, done.stderr
    alone = train(config, folder=tmp_path / "one", device="cuda")
    assert json.loads(done.stdout)["validation_loss"] == pytest.approx(alone.validation_loss, rel=1e-4)


def test_an_error_is_told_once(small: Make, tmp_path: Path) -> None:
    done = torchrun(2, small(accumulation=2, data=str(tmp_path / "nothing.txt")), tmp_path / "run")
    assert done.returncode != 0
    assert done.stderr.count("There is no file or folder") == 1
    assert not (tmp_path / "run").exists()


def test_a_group_of_one_asks_nobody() -> None:
    group = Group(rank=0, world_size=1, device=torch.device("cpu"))
    values = torch.ones(3)
    assert group.first(lambda: 5) == 5
    assert group.gathered("a") == ["a"]
    assert group.mean(values) is values
    assert group.agreed("a") == "a"
    module = torch.nn.Linear(2, 2)
    assert group.wrapped(module) is module
