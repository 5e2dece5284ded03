"""A language model of a few hundred weights, for tests of what surrounds a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fuseline import native
from fuseline.training.config import TrainConfig, preset
from fuseline.training.metrics import METRICS, read_metrics


class TinyModel(nn.Module):
    """Embedding, norm, one hidden layer, dropout, head. Called with targets it returns the mean loss."""

    def __init__(self, vocab_size: int = 17, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor | None = None) -> torch.Tensor:
        hidden = torch.relu(self.hidden(self.norm(self.embedding(tokens_BT))))
        logits = self.head(self.dropout(hidden))
        if targets_BT is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten())


def make_tiny_model(device: str = "cpu", **options: Any) -> TinyModel:
    torch.manual_seed(0)
    return TinyModel(**options).to(device)


def make_batches(
    count: int, *, batch: int = 4, seqlen: int = 8, seed: int = 1, device: str = "cpu"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, 17, (batch, seqlen + 1), generator=generator).to(device) for _ in range(count)]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in drawn]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose by sharing their work out, and threads that wait spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny_model() -> Callable[..., TinyModel]:
    """Makes a `TinyModel`, the same weights each time."""
    return make_tiny_model


@pytest.fixture
def batches() -> Callable[..., list[tuple[torch.Tensor, torch.Tensor]]]:
    """Draws random batches, the same each time for a seed."""
    return make_batches


def make_small_config(text: Path, **overrides: Any) -> TrainConfig:
    values = {
        "data": str(text),
        "tokenizer": "char",
        "num_layers": 2,
        "num_heads": 2,
        "embed_dim": 16,
        "block_size": 16,
        "batch_size": 4,
        "steps": 12,
        "warmup_steps": 3,
        "decay_steps": 100,
        "learning_rate": 1e-2,
        "dropout": 0.1,
        "log_interval": 5,
        "eval_interval": 6,
        "eval_batches": 2,
        "checkpoint_interval": 4,
        "sample_interval": 6,
        "sample_tokens": 5,
    }
    return preset("tiny", **{**values, **overrides})


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few kilobytes of text."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"{n} sheep and {n * n} goats went by. " for n in range(200)))
    return path


@pytest.fixture
def small(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainConfig]:
    """Makes a configuration that trains in a moment, with a cache of its own. The libraries in it are
    everybody's: other processes of a test would compile them anew."""
    cache, libraries = tmp_path / "cache", native.cache_dir() / "lib"
    cache.mkdir()
    if libraries.is_dir():
        (cache / "lib").symlink_to(libraries)
    monkeypatch.setenv("FUSELINE_CACHE", str(cache))
    return lambda **overrides: make_small_config(text_file, **overrides)


def course(folder: Path) -> list[dict[str, Any]]:
    """What a run's metrics say of its course, without how fast it went."""
    entries = [dict(entry) for entry in read_metrics(folder / METRICS) if entry["kind"] != "pace"]
    for entry in entries:
        entry.pop("seconds", None)
    return entries


@pytest.fixture(name="course")
def _course() -> Callable[[Path], list[dict[str, Any]]]:
    return course
