"""The suite on a processor, tiny: what it writes, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuseline.bench.compile import BACKENDS, MODELS, CompileBench, run
from fuseline.bench.compile import suite as suite_module
from fuseline.bench.compile.backends import Backend
from fuseline.bench.compile.contest import OUT_OF_TIME
from fuseline.bench.compile.outcome import Measured, Outcome
from fuseline.errors import InputError
from fuseline.records import read

CPU = torch.device("cpu")
WORDS = "the quick brown fox jumps over the lazy dog and runs away from it " * 40


def bench(**options: object) -> CompileBench:
    settings: dict[str, object] = {
        "device": CPU,
        "preset": "small",
        "precision": "fp32",
        "iterations": 6,
        "models": ("lstm", "vit"),
        "backends": ("eager", "cudagraphs"),
    }
    return CompileBench(**{**settings, **options})  # type: ignore[arg-type]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "words.txt"
    path.write_text(WORDS)
    return path


def test_records_and_traces_are_written(tmp_path: Path, text: Path) -> None:
    events = []
    out = tmp_path / "out"
    records = run(bench(data=str(text)), out, lambda *event: events.append(event))
    assert read(out / "compile.jsonl") == records
    trace = json.loads((out / "traces" / "lstm-eager.json").read_text())
    assert len(trace) == 6
    assert not (out / "traces" / "lstm-cudagraphs.json").exists()
    times = {r.case["model"]: r for r in records if r.metric == "iteration_mean_ms"}
    assert set(times) == {"lstm", "vit"}
    assert times["lstm"].value == pytest.approx(sum(trace) / 6, abs=1e-3)
    assert times["lstm"].case["vocab"] == len(set(WORDS))
    assert {r.case["model"] for r in records if r.metric == "skipped"} == {"lstm", "vit"}
    assert events == [
        (model, backend, phase, done, 6)
        for model in ("lstm", "vit")
        for backend, phase, done in (("data", "read", 0), ("eager", "prepare", 0), ("eager", "run", 6))
    ]


def test_a_budget_leaves_what_there_is_no_time_for(tmp_path: Path, text: Path) -> None:
    records = run(bench(data=str(text), budget_s=1e-9), tmp_path, lambda *_: None)
    reasons = {r.case["reason"] for r in records if r.peer == "eager"}
    assert reasons == {OUT_OF_TIME}


def test_each_backend_is_on_record_before_the_next_and_a_resumed_run_does_the_rest(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "compile.jsonl"
    asked: list[str] = []
    most = 1

    def compare(_w: object, backends: Sequence[Backend], *_: object, **__: object) -> Iterator[Outcome]:
        for number, backend in enumerate(backends):
            asked.append(backend.name)
            if number == most:
                raise KeyboardInterrupt
            yield Outcome(backend, Measured([1.0] * 6, [0.0] * 6, 1.5, None, None, None))
            assert read(file)[-1].peer == backend.name

    monkeypatch.setattr(suite_module, "compare", compare)
    three = bench(models=("vit",), backends=("eager", "inductor", "cudagraphs"), resume=True)
    for wanted in (["eager", "cudagraphs"], ["cudagraphs", "inductor"]):
        asked.clear()
        with pytest.raises(KeyboardInterrupt):
            run(three, tmp_path, lambda *_: None)
        assert asked == wanted
    most = 9
    for wanted in (["inductor"], []):
        asked.clear()
        run(three, tmp_path, lambda *_: None)
        assert asked == wanted
    timed = [record.peer for record in read(file) if record.metric == "iteration_ms"]
    assert timed == ["eager", "cudagraphs", "inductor"]


def test_what_found_no_time_is_run_by_a_resumed_run(tmp_path: Path, text: Path) -> None:
    small = bench(models=("vit",), backends=("eager", "cudagraphs"))
    run(replace(small, budget_s=1e-9), tmp_path, lambda *_: None)
    records = run(replace(small, resume=True), tmp_path, lambda *_: None)
    assert {(r.peer, r.metric) for r in records} >= {("eager", "iteration_ms")}
    assert "cudagraphs" not in {record.peer for record in records}
    assert run(replace(small, resume=True), tmp_path, lambda *_: None) == []


def test_the_plan_names_what_will_be_skipped() -> None:
    assert bench(models=("vit",)).plan() == [
        ("vit", "eager", None),
        ("vit", "cudagraphs", "needs a CUDA device: it replays CUDA graphs"),
    ]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"models": ("vitt",)}, "no model named 'vitt'. Did you mean 'vit'"),
        ({"backends": ("eagr",)}, "no backend named 'eagr'. Did you mean 'eager'"),
        ({"preset": "middle"}, "no preset named 'middle'"),
        ({"iterations": 0}, "0 iterations"),
        ({"budget_s": 0.0}, "A budget of 0 minutes"),
        ({"price_per_hour": -1.0}, "A price of -1.0 an hour"),
        ({"models": ()}, "Nothing to compare"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench(**options)


def test_text_too_short_for_a_batch_is_the_users_to_mend(tmp_path: Path, text: Path) -> None:
    text.write_text("too short")
    with pytest.raises(InputError):
        run(bench(data=str(text)), tmp_path / "out", lambda *_: None)


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning")  # from inductor's own imports
def test_inductor_is_timed_beside_eager_and_agrees_with_it(tmp_path: Path) -> None:
    records = run(bench(models=("vit",), backends=("eager", "inductor")), tmp_path, lambda *_: None)
    found = {r.metric: r for r in records if r.peer == "inductor" and r.case["model"] == "vit"}
    assert "skipped" not in found, found["skipped"].case["reason"]
    assert found["loss_error"].value is not None
    assert found["loss_error"].value < 1e-4
    assert found["paired_speedup"].value is not None
    assert math.isfinite(found["paired_speedup"].value)
    assert found["compile_s"].value is not None
    assert found["compile_s"].value > 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inductor's own imports
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # from inductor's autotuning
@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu_all_backends_take_turns_and_agree(model: str, tmp_path: Path, text: Path) -> None:
    small = bench(
        device=torch.device("cuda"),
        precision="bf16",
        models=(model,),
        backends=tuple(BACKENDS),
        iterations=20,
        data=str(text),
    )
    records = run(small, tmp_path / "out", lambda *_: None)
    assert [(r.peer, r.case["reason"]) for r in records if r.metric == "skipped"] == []
    for backend in tuple(BACKENDS)[1:]:
        found = {r.metric: r for r in records if r.peer == backend and r.case["model"] == model}
        assert found["iteration_ms"].n == 20
        assert found["paired_speedup"].value is not None
        assert found["loss_error"].value is not None
        assert found["loss_error"].value < 0.01
