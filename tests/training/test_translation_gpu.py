from __future__ import annotations

from pathlib import Path

import pytest

from fuseline.training.metrics import METRICS, read_metrics
from fuseline.training.translation_config import preset
from fuseline.training.translation_train import train_translation

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
def test_a_recorded_step_learns_what_an_eager_one_does(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several lengths, each a graph of its own, with dropout 0: the curves agree to rounding."""
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "cache"))
    curves = {}
    for name, options in {
        "recorded": {"execution": "graph"},
        "eager": {"execution": "eager"},
        "unfused": {"execution": "eager", "fused": False},
    }.items():
        config = preset(
            "tiny", architecture=architecture, steps=30, precision="fp32", bleu=False, length=96, **options
        )
        train_translation(config, folder=tmp_path / name, device="cuda")
        entries = read_metrics(tmp_path / name / METRICS)
        curves[name] = [entry["loss"] for entry in entries if entry["kind"] == "step"]
    assert len(curves["eager"]) == 30
    assert curves["eager"][-1] < curves["eager"][0] - 1.0
    assert curves["recorded"] == pytest.approx(curves["eager"], rel=1e-4)
    assert curves["unfused"] == pytest.approx(curves["eager"], rel=1e-3)


def test_it_translates_on_a_gpu_after_training_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "cache"))
    config = preset("tiny", average=0.99, dropout=0.05, precision="bf16", beams=4)
    result = train_translation(config, folder=tmp_path / "run", device="cuda")
    assert result.bleu is not None
    assert result.bleu > 85
