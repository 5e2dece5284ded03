"""A run of the suite on a CPU: records, what is left to resume, and the table that is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuseline.bench.attention import run as attention_run
from fuseline.bench.attention.evaluate import Truth
from fuseline.bench.attention.measured import as_entry, measure_again, measure_all, read
from fuseline.bench.attention.results import Ceilings, Result, case_of, records_of
from fuseline.bench.attention.run import AttentionBench, evaluate, run, summary
from fuseline.bench.attention.suites import typical
from fuseline.bench.attention.table import write_table
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.draw import draw
from fuseline.ops.attention.fitted import load
from fuseline.ops.attention.measure import Times
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tables import read_entries
from fuseline.records import describe
from fuseline.timing import summarize

CPU = torch.device("cpu")
SMALL = Problem(CPU, torch.float32, 2, 4, 2, 16, 24, 8, direction="fwbw", causal="bottom_right")


def quiet(now: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def small_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [SMALL, replace(SMALL, mask="bool", mask_dims="bs"), replace(SMALL, sinks=True, soft_cap=True)]
    monkeypatch.setattr(attention_run, "problems_of", lambda suite, device: problems)
    monkeypatch.setattr(attention_run, "_ceilings", lambda device: Ceilings(10.0, {4: 0.1}))


@pytest.mark.usefixtures("small_suites")
def test_records_every_candidate_and_the_pick(tmp_path: Path) -> None:
    outcome = run(AttentionBench(("masks",), CPU), tmp_path, quiet)
    assert outcome.left == 0
    found = {(r.peer, r.metric) for r in outcome.records if r.case.get("mask") == "bool bs"}
    for peer in ("math", "flash", "pick"):
        assert {(peer, m) for m in ("time_us", "tflops", "bandwidth_gbs", "share_of_floor", "error")} <= found
    assert ("pick", "share_of_best") in found
    reasons = {r.peer: r.case["reason"] for r in outcome.records if r.metric == "skipped"}
    assert reasons["cudnn"] == "it is a CUDA kernel; the device is cpu"
    errors = [r.value for r in outcome.records if r.metric == "error"]
    assert errors
    assert all(value is not None and value < 1e-5 for value in errors)
    assert {r.case["section"] for r in outcome.records} == {"masks", "ceilings"}


@pytest.mark.usefixtures("small_suites")
def test_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = run(AttentionBench(("masks",), CPU, budget_seconds=0.0), tmp_path, quiet)
    assert first.left == 3
    second = run(AttentionBench(("masks",), CPU, resume=True, every=2), tmp_path, quiet)
    assert len(second.results) == 1
    third = run(AttentionBench(("masks",), CPU, resume=True), tmp_path, quiet)
    assert len(third.results) == 2


def test_what_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = CANDIDATES["flash"]

    def wrong(call: object) -> object:
        out, lse = flash.run(call)  # type: ignore[arg-type]
        return out * 1.1, lse

    monkeypatch.setitem(CANDIDATES, "flash", replace(flash, run=wrong))
    result = evaluate(SMALL, 0, with_compiled=False)
    assert "flash" not in result.times.times_us
    assert result.times.failed["flash"].startswith("computes something else: error 0.1")
    assert result.picked == "flash", "by the rule of a CPU"
    assert summary([result]) == {"problems": 0, "wrong": 1}


def test_the_summary_counts_what_is_near() -> None:
    results = [
        Result(Times(SMALL, {"math": 10.0, "flash": flash}), "math") for flash in (9.8, 5.0, 20.0, 30.0)
    ]
    told = summary(results)
    assert told["problems"] == 4
    assert told["within_3_percent"] == pytest.approx(0.75)
    assert told["worst_share"] == pytest.approx(0.5)
    assert told["wrong"] == 0
    assert "tuned_within_3_percent" not in told
    tuned = [replace(result, tuned="flash") for result in results]
    assert summary(tuned)["tuned_within_3_percent"] == pytest.approx(0.5)


def test_a_random_problem_is_judged_tuned_too() -> None:
    result = evaluate(SMALL, 0, with_compiled=False, with_tuned=True)
    assert result.tuned in result.times.times_us
    records = records_of(result, "picker", Ceilings(10.0, {}), describe(CPU))
    assert {r.metric for r in records} == {"time_us", "error", "share_of_best", "skipped"}
    (record,) = [r for r in records if r.case.get("tuned")]
    assert (record.peer, record.metric) == ("pick", "share_of_best")


def test_a_time_has_the_interval_of_its_turns_and_a_rate_that_of_its_time() -> None:
    times = Times(SMALL, {"math": 10.0, "flash": 90.0}, {}, {"math": summarize([8.0, 10.0, 20.0])})
    records = records_of(Result(times), "masks", Ceilings(1.0, {}), describe(CPU))
    found = {(r.peer, r.metric): r for r in records}
    time_us, rate = found["math", "time_us"], found["math", "bandwidth_gbs"]
    assert (time_us.value, time_us.low, time_us.high, time_us.n) == (10.0, 8.0, 20.0, 3)
    assert rate.value is not None
    assert (rate.low, rate.high) == (pytest.approx(rate.value / 2), pytest.approx(rate.value * 1.25))
    far = found["flash", "time_us"]
    assert (far.value, far.low, far.n) == (90.0, None, 1), "it ran twice, and took no turns"


def test_truth_is_of_the_first_key_head() -> None:
    problem = replace(SMALL, heads=6, kv_heads=2, mask="float", mask_dims="hts", sinks=True)
    truth = Truth(problem, draw(problem, 3))
    assert truth.error("math") < 1e-5
    assert not Truth.fits(replace(SMALL, seqlen_q=2**14, seqlen_k=2**14))
    assert not Truth.fits(replace(SMALL, dropout_p=0.1))
    assert Truth.fits(replace(SMALL, dropout_p=0.1, seeded=True))


def test_the_case_of_a_record_names_what_is_there() -> None:
    problem = replace(SMALL, window_left=5, mask="bool", mask_dims="bs", dropout_p=0.1, sinks=True)
    case = case_of(problem, "masks")
    assert (case["window"], case["mask"], case["dropout"], case["sinks"]) == ("5,-1", "bool bs", 0.1, True)
    assert "soft_cap" not in case
    times = Times(problem, {"math": 100.0}, {"flash": "it has no sinks"})
    records = records_of(Result(times, "math"), "masks", Ceilings(10.0, {}), describe(CPU))
    assert [(r.peer, r.metric) for r in records][:2] == [("flash", "skipped"), ("math", "time_us")]


def test_lines_are_read_again_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "times.jsonl"
    found = measure_all([SMALL], file, budget_seconds=None)
    with file.open("a") as lines:
        lines.write('{"dtype": "flo')
    (again,) = read(file)
    assert again.problem == SMALL
    assert again.times_us.keys() == found.times[0].times_us.keys()
    assert again.failed["cudnn"] == "it is a CUDA kernel; the device is cpu"
    assert measure_all([SMALL], file, budget_seconds=0.0).left == 0, "it is done already"


def test_what_changed_is_measured_again_over_what_was(tmp_path: Path) -> None:
    file = tmp_path / "times.jsonl"
    other = replace(SMALL, batch=3)
    stale = [
        Times(p, {"math": 1.0, "flash": 1.05, "efficient": 7.0}, {"cudnn": "no"}) for p in (SMALL, other)
    ]
    far = Times(replace(SMALL, batch=5), {"math": 9.0, "flash": 1.0})
    lines = [{**as_entry(times).to_json(), "failed": dict(times.failed)} for times in (*stale, far)]
    file.write_text("".join(json.dumps(line) + "\n" for line in [lines[1], *lines]))
    found = measure_again(["math"], file, budget_seconds=None)
    assert [times.problem for times in found.times] == [SMALL, other], (
        "the longest ago first; the far one not"
    )
    latest = {times.problem: times for times in read(file)}
    assert latest[SMALL].times_us["math"] > 1.0, "it is the measured time now"
    assert latest[SMALL].times_us["efficient"] == 7.0, "what was not measured again is kept"
    assert latest[SMALL].failed["cudnn"] == "no"
    assert latest[far.problem] == far


def test_a_table_is_written_and_added_to_and_networks_are_fitted(tmp_path: Path) -> None:
    file, lines = tmp_path / "shipped" / "table.json", tmp_path / "times.jsonl"
    first = write_table(file, lines, 2, CPU, steps=3)
    assert (first.entries, first.fitted, first.left) == (2, 4, 0)
    assert write_table(file, lines, 4, CPU, budget_seconds=0.0, steps=3).left == 2
    second = write_table(file, lines, 4, CPU, steps=3)
    assert (second.entries, second.fitted) == (2, 6)
    assert {entry.problem for entry in read_entries(file)} == set(typical(CPU))
    fitted = load(file.with_suffix(".npz"))
    assert fitted is not None
    assert fitted.problems == 6
    assert fitted.estimate(SMALL, ["math", "cudnn"]).keys() == {"math"}
