"""examples/accelerate_*.py: they run, and what they train learns."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from fuseline.acceleration import kept_proofs

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_proofs, "folder", lambda: tmp_path / "proofs")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    losses = example("accelerate_loop").main(steps=12, device="cpu")
    assert losses[-1] < losses[0]
    out = capsys.readouterr().out
    assert "layer_norm" in out
    assert "eager" in out


def test_transformers_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers.Trainer needs the package accelerate")
    assert 0 < example("accelerate_trainer").main(str(tmp_path), steps=2) < 10
    assert "rms_norm" in capsys.readouterr().out


def test_lightning(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    example("accelerate_lightning").main(steps=2)
    assert "layer_norm" in capsys.readouterr().out
