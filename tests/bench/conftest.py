from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from fuseline.bench import compiling
from fuseline.training.config import preset
from fuseline.training.train import train


@pytest.fixture(scope="session")
def train_tiny() -> Callable[..., Path]:
    """Trains a tiny GPT of characters for a few steps in a folder, its cache too, and returns its run."""

    def trained(folder: Path, **settings: object) -> Path:
        text = folder / "text.txt"
        text.write_text("".join(f"line {i} of {i * i} lines\n" for i in range(800)))
        config = preset(
            "tiny",
            data=str(text),
            tokenizer="char",
            num_layers=1,
            num_heads=2,
            embed_dim=64,
            warmup_steps=2,
            execution="eager",
            eval_interval=0,
            sample_interval=0,
            **settings,
        )
        train(config, folder=folder / "run", cache_dir=folder)
        return folder / "run"

    return trained


class Pool:
    """Takes tasks as a pool of processes does, and notes them; one in which 32 stands fails."""

    def __init__(self, *_: object, **__: object) -> None:
        self.tasks: list[tuple[Any, ...]] = []

    def submit(self, function: object, *task: Any) -> Future[None]:
        self.tasks.append(task)
        future: Future[None] = Future()
        future.set_exception(RuntimeError("cannot")) if 32 in task else future.set_result(None)
        return future

    def shutdown(self, **_: object) -> None:
        pass


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """The pools that `fuseline.bench.compiling` makes, none of which starts a process."""
    made: list[Pool] = []

    def make(*arguments: object, **options: object) -> Pool:
        made.append(Pool(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(compiling, "ProcessPoolExecutor", make)
    return made
