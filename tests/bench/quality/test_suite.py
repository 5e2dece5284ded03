"""The quality suite: a small trained model, its perplexity by format on the text it never saw."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuseline import report
from fuseline.bench.quality import QualityBench, run
from fuseline.cli.main import run as command
from fuseline.data.batches import validation_batches
from fuseline.data.corpora import load_corpus
from fuseline.data.token_files import prepare
from fuseline.errors import InputError
from fuseline.training.checkpoint import load_weights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, train_tiny: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_tiny(folder, block_size=32, batch_size=8, steps=30)
    return folder


def test_a_file_takes_the_place_of_the_held_out_part(trained: Path, tmp_path: Path) -> None:
    texts = {"seen.txt": "line 7 of 49 lines\n" * 60, "strange.txt": "sile enil 94 fo 7\n" * 60}
    found = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        bench = QualityBench(CPU, trained / "run", ("int8",), 2, 1, text=tmp_path / name)
        records = run(bench, tmp_path, lambda *_: None, cache_dir=trained)
        assert {r.case["text"] for r in records} == {name}
        found[name] = records[0].value or 0.0
    assert found["seen.txt"] < found["strange.txt"]
    with pytest.raises(InputError, match="Cannot read text"):
        run(QualityBench(CPU, trained / "run", text=tmp_path / "none.txt"), tmp_path, lambda *_: None)


def test_formats_are_measured_on_the_held_out_text(trained: Path, tmp_path: Path) -> None:
    bench = QualityBench(
        CPU,
        trained / "run",
        ("int8", "int4", "int4-32-calibrated", "cache-int8", "cache-fp8"),
        batches=3,
        calibration=2,
    )
    records = run(bench, tmp_path, lambda *_: None, cache_dir=trained)
    found = {(r.case["format"], r.case["group_size"]): r.value for r in records if r.metric == "perplexity"}
    plain = found.pop(("float32", None))
    assert plain is not None
    dataset = prepare(
        load_corpus(str(trained / "text.txt"), trained), "char", validation_fraction=0.1, cache_dir=trained
    )
    model = load_weights(trained / "run" / "best.pt").eval()
    with torch.no_grad():
        losses = [
            float(model(*batch))
            for batch in validation_batches(
                dataset.validation, batch_size=8, block_size=32, count=3, device="cpu"
            )
        ]
    assert plain == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)
    assert set(found) == {
        ("int8", None),
        ("int4", 128),
        ("int4", 32),
        ("int8 cache", None),
        ("fp8 cache", None),
    }
    errors = {(r.case["format"], r.case["group_size"]): r.value for r in records if r.metric == "loss_error"}
    for key, value in found.items():
        assert value is not None
        assert value != plain
        assert errors[key] == pytest.approx(value / plain - 1)
    assert abs(errors["int8", None] or 1) < abs(errors["int4", 128] or 0)
    assert 1e-9 < abs(errors["int8 cache", None] or 0) < abs(errors["fp8 cache", None] or 0) < 0.05
    assert "perplexity" in report.build(records, tmp_path).read_text()


def test_few_bits_stand_against_what_they_cost(trained: Path, tmp_path: Path) -> None:
    """One plot of all that have bits; what needs a GPU is skipped with a reason."""
    formats = (
        "ternary",
        "ternary-calibrated",
        "nf4",
        "mxfp4-fitted",
        "int8",
        "w8a8",
        "sparse24",
        "cache-int8",
    )
    records = run(
        QualityBench(CPU, trained / "run", formats, 2, 1), tmp_path, lambda *_: None, cache_dir=trained
    )
    (skipped,) = (r for r in records if r.metric == "skipped")
    assert skipped.case["format"] == "sparse24"
    assert "run on NVIDIA GPUs" in str(skipped.case["reason"])
    bits = {(r.case["format"], r.case["rounding"]): r.value for r in records if r.metric == "bits_per_weight"}
    # Layers of 64 and 256 inputs: ternary rows of 13 and 52 bytes, and a scale for 128 columns.
    assert bits == {
        ("float32", "nearest"): 32,
        ("ternary", "nearest"): pytest.approx(8 * (13 + 2) / 64 * 2 / 3 + 8 * (52 + 4) / 256 / 3),
        ("ternary", "calibrated"): pytest.approx(8 * (13 + 2) / 64 * 2 / 3 + 8 * (52 + 4) / 256 / 3),
        ("nf4", "nearest"): 4.25,
        ("mxfp4", "fitted"): 4.25,
        ("int8", "nearest"): pytest.approx(8 + 32 / 64 * 2 / 3 + 32 / 256 / 3),
        ("w8a8", "nearest"): pytest.approx(8 + 32 / 64 * 2 / 3 + 32 / 256 / 3),
    }
    costs = {(r.case["format"], r.case["rounding"]): r.value for r in records if r.metric == "loss_error"}
    assert (costs["ternary", "nearest"] or 0) > abs(costs["nf4", "nearest"] or 1)
    page = report.build(records, tmp_path).read_text()
    assert "Perplexity against bits a weight" in page
    for name in ("ternary", "nf4", "mxfp4", "w8a8"):
        assert f"<title>{name}: " in page
    assert (tmp_path / "formats-1.png").stat().st_size > 1000


def test_what_cannot_be_is_refused(trained: Path) -> None:
    with pytest.raises(InputError, match="Did you mean 'int8'"):
        QualityBench(CPU, trained / "run", ("int9",))
    with pytest.raises(InputError, match="not the folder of a run"):
        QualityBench(CPU, trained)
    with pytest.raises(InputError, match="batches is 0"):
        QualityBench(CPU, trained / "run", batches=0)


def test_the_command(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["bench", "quality", "--device", "cpu"]) == 2
    assert "--checkpoint FOLDER" in capsys.readouterr().err
    arguments = ["bench", "quality", "--device", "cpu", "--checkpoint", str(trained / "run")]
    assert command([*arguments, "--dry-run"]) == 0
    assert "int4-calibrated" in capsys.readouterr().out
