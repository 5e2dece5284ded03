"""The whole ladder on a little text, on a CPU: it trains, measures, records, resumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuseline.bench import ladder
from fuseline.bench.ladder.events import LossPoint, RungEnded, RungStarted, Started
from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.run import kept_seconds
from fuseline.errors import InputError
from fuseline.records import append, read

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs.\n"


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own, no compiling, and a head smaller than GPT-2's for the products alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("FUSELINE_NATIVE", "0")
        patch.setattr("fuseline.bench.ladder.afterwards.GPT2_VOCAB", 257)
        patch.setattr("fuseline.bench.ladder.measure.REPEATS", 0)  # whoever else keeps this machine busy
        yield


def _settings(folder: Path) -> ladder.Settings:
    text = folder / "text.txt"
    text.write_text(TEXT * 100)
    return ladder.Settings(
        preset="tiny",
        device="cpu",
        out=folder / "out",
        data=str(text),
        tokenizer="char",
        batch=2,
        seqlen=32,
        rungs=("tf32", "math", "padded-vocabulary", "optimizer"),
        steps=3,
        runs=5,
    )


@pytest.fixture
def settings(tmp_path: Path) -> ladder.Settings:
    return _settings(tmp_path)


@pytest.fixture(scope="module")
def climbed(tmp_path_factory, quick):
    settings = _settings(tmp_path_factory.mktemp("climbed"))
    settings.out.mkdir()
    (settings.out / ladder.RECORDS).write_text("old\n")
    events = []
    outcome = ladder.run(settings, events.append)
    assert (settings.out / "ladder-previous.jsonl").read_text() == "old\n", "old records are set aside"
    return outcome, events, read(settings.out / ladder.RECORDS)


@pytest.fixture
def resumable(climbed, settings):
    """Settings whose folder holds the records of `climbed`."""
    append(settings.out / ladder.RECORDS, climbed[2])
    return settings


def test_every_rung_is_measured_or_has_its_reason(climbed):
    outcome, events, records = climbed
    names = ["plain PyTorch", "fused-adamw", "tf32", "math", "padded-vocabulary"]
    assert [result.name for result in outcome.results] == names
    assert [event.result.name for event in events if isinstance(event, RungEnded)] == names
    assert [event.name for event in events if isinstance(event, RungStarted)] == [*names[:2], *names[3:]]
    assert next(event.total for event in events if isinstance(event, Started)) == 4  # TF32 cannot be tried
    assert "CUDA" in outcome.results[2].reason
    for result in (*outcome.results[:2], *outcome.results[3:]):
        figures = result.measurement.figures
        assert figures["iteration_ms"].n == 5
        assert figures["iteration_ms"].low <= figures["iteration_ms"].value <= figures["iteration_ms"].high
        rate = 2 * 32 * 1e3 / figures["iteration_ms"].value
        assert figures["tokens_per_s"].value == pytest.approx(rate)
        assert 0 <= figures["data_wait_share"].value < 1
        assert figures["loss_error"].value < 1e-5
        assert figures["grad_error"].value < 1e-4
        assert "addmm" in result.measurement.kernels or "mm" in result.measurement.kernels
        assert ("paired_speedup" in figures) == (result.name != "plain PyTorch")
    recorded = {record.case["rung"] for record in records if record.metric == "iteration_ms"}
    assert recorded == {*names[:2], *names[3:]}
    assert [r.case["reason"] for r in records if r.metric == "skipped"] == [outcome.results[2].reason]


def test_training_goes_on_from_rung_to_rung(climbed):
    outcome, events, records = climbed
    steps = [step for step, _ in outcome.curve]
    assert len(steps) in (4 * 5, 5 * 5)  # four rungs, five runs each; and five for the ends, if one was kept
    assert steps == sorted(set(steps))
    losses = [loss for _, loss in outcome.curve]
    assert losses[-1] < losses[0] - 0.5
    assert outcome.curve == tuple((e.step, e.loss) for e in events if isinstance(e, LossPoint))
    curve = [r for r in records if r.case.get("section") == "curve"]
    assert [(r.case["step"], r.value) for r in curve] == list(outcome.curve)
    assert outcome.validation_loss == pytest.approx(losses[-1], abs=1.0)
    assert set(outcome.sample) <= set(TEXT)


def test_the_sections_are_on_record(climbed):
    _, _, records = climbed
    assert {"head_gemm", "stability", "curve", "sample"} <= {r.case.get("section") for r in records}


def test_a_resumed_ladder_runs_only_what_is_not_on_record(resumable, climbed):
    outcome, _, before = climbed
    more = dataclasses.replace(resumable, rungs=("math", "optimizer", "auto"), resume=True)
    events = []
    again = ladder.run(more, events.append)
    started = [event.name for event in events if isinstance(event, RungStarted)]
    assert "plain PyTorch" not in started
    assert "math" not in started
    assert "auto" in started
    assert again.results[0].iteration_ms == outcome.results[0].iteration_ms
    after = read(resumable.out / ladder.RECORDS)
    assert after[: len(before)] == before
    of_baseline = [r for r in after if r.case.get("rung") == "plain PyTorch" and r.metric == "iteration_ms"]
    assert len(of_baseline) == 1


def test_a_spent_budget_ends_the_ladder_with_reasons(settings):
    outcome = ladder.run(dataclasses.replace(settings, budget_seconds=1e-3), lambda event: None)
    ran = [result for result in outcome.results if result.reason is None]
    assert ran == []
    assert "not reached" in outcome.results[0].reason
    skipped = {r.case["section"] for r in outcome.sections if r.metric == "skipped"}
    assert skipped == {"head_gemm", "stability"}


def test_an_unknown_preset_is_refused_before_anything_is_prepared(settings):
    events = []
    with pytest.raises(InputError, match="no preset named 'gpt3'"):
        ladder.run(dataclasses.replace(settings, preset="gpt3"), events.append)
    assert events == []


def test_a_text_shorter_than_a_sequence_is_refused(settings, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(InputError, match="33 tokens"):
        ladder.run(dataclasses.replace(settings, data=str(short)), lambda event: None)


def test_the_plan_says_what_would_run_and_why_not(settings):
    lines = {line.name: line for line in ladder.plan(settings)}
    assert lines["math"].reason is None
    assert "CUDA" in lines["tf32"].reason
    assert not settings.out.exists()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"batch": 0}, "--batch-size 0"),
        ({"steps": -1}, "--steps -1"),
        ({"max_batch": "al"}, "'all'"),
        ({"preset": "tinny"}, "'tiny'"),
        ({"rungs": ("flsh",)}, "'flash'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, change, said):
    with pytest.raises(InputError, match=said):
        ladder.plan(dataclasses.replace(settings, **change))


@pytest.mark.parametrize(
    "rungs, max_batch, seconds",
    [
        (("seed-001",), "kept", 20.0),  # all of it is compiled
        (("seed-003",), "kept", 20.0 + 15.0),  # but for eager
        ((), "kept", 20.0 + 5 * 15.0),
        ((), "fit", 20.0),
    ],
)
def test_time_is_kept_for_as_many_trials_of_batches_as_there_may_be(
    rungs: tuple[str, ...], max_batch: str, seconds: float, tmp_path: Path
) -> None:
    mode = "combination" if rungs else "cumulative"
    settings = ladder.Settings("gpt2", "cuda", tmp_path, mode=mode, rungs=rungs, max_batch=max_batch)
    machine = Machine(device="cuda", name="a GPU", bf16="tensor cores")
    assert kept_seconds(settings, settings.base, machine) == seconds
