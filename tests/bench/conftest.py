from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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
