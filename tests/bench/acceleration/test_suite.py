"""The suite of users' models: what computes the same has small errors, what fails is refused alone."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseline.acceleration import accelerate, kept_proofs
from fuseline.bench.acceleration import (
    CASES,
    CONTENDERS,
    DEFAULTS,
    AccelerationBench,
    contenders,
    find_cases,
    liger,
    run,
)
from fuseline.bench.acceleration import suite as suites
from fuseline.bench.acceleration.case import Case
from fuseline.bench.acceleration.contenders import Contender, enter
from fuseline.bench.acceleration.contest import OUT_OF_TIME, Contest, Outcome, Settings, close, hold
from fuseline.bench.acceleration.errors import reference
from fuseline.bench.acceleration.models import Made, make
from fuseline.bench.acceleration.results import records_of
from fuseline.cli.main import run as command
from fuseline.errors import InputError
from fuseline.records import describe, read

CPU = torch.device("cpu")
OURS_AND_EAGER = ("eager", "fuseline", "fuseline-eager")


@pytest.fixture(autouse=True)
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Proofs of a test are its own, what is proved is kept, whatever it takes on this machine, and one thread
    computes: for models this small two wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(kept_proofs, "folder", lambda: tmp_path / "proofs")
    monkeypatch.setattr(contenders, "accelerate", partial(accelerate, time_sites=False))
    yield
    torch.set_num_threads(threads)


def settings() -> Settings:
    return Settings(CPU, "fp32", 0.02, 6, 0)


def nothing(*_: object) -> None:
    pass


def test_records_of_a_step_and_of_a_forward_pass(tmp_path: Path) -> None:
    file = tmp_path / "acceleration.jsonl"
    cases = ("qwen2-0.5b", "bert-base-forward")
    bench = AccelerationBench(CPU, cases, "small", "fp32", OURS_AND_EAGER, seconds=0.05, rounds=6)
    records = run(bench, file, nothing)
    found = {(r.case["task"], r.peer, r.metric): r for r in records}
    for task in ("train", "forward"):
        for peer in OURS_AND_EAGER:
            assert found[task, peer, "iteration_ms"].value > 0
            assert found[task, peer, "compile_s"].value > 0
        ratio = found[task, "fuseline-eager", "paired_speedup"]
        assert ratio.n == found[task, "eager", "iteration_ms"].n >= 6
        assert found[task, "fuseline", "accelerate_s"].value < found[task, "fuseline", "compile_s"].value
        assert str(found[task, "fuseline", "kernels"].case["names"]).startswith("eager: the model is on cpu")
    for peer in OURS_AND_EAGER:
        assert found["train", peer, "loss_error"].value < 1e-6
        assert found["train", peer, "grad_error"].value < 1e-5
        assert found["forward", peer, "error"].value < 1e-5
    assert ("train", "eager", "paired_speedup") not in found
    assert found["train", "eager", "iteration_ms"].case["preset"] == "small"
    assert read(file) == records


def test_a_peer_that_fails_is_refused_alone() -> None:
    """In its making, for another loss, and in the middle of its turns."""
    (case,) = find_cases(["encoder"], "small")
    turns = 0

    def take(name: str, case: Case, made: Made) -> Contender:
        contender = replace(enter("eager", case, made), name=name)
        step = contender.step

        def third_turn() -> object:
            nonlocal turns
            turns += 1
            if turns > 12:
                raise RuntimeError("the kernel image is invalid\nmore")
            return step()

        if name == "inductor":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        if name == "fuseline-eager":
            contender.step = lambda: step() * 2
        if name == "fuseline":
            contender.step = third_turn
        return contender

    names = ("eager", "inductor", "fuseline", "fuseline-eager", "reduce-overhead")
    contest = hold(case, names, settings(), nothing, take=take)
    assert [outcome.contender.name for outcome in contest.outcomes] == ["eager"]
    assert len(contest.outcomes[0].times_ms) == 6
    assert contest.refused["inductor"] == "does not fit in this device's memory beside the others"
    assert contest.refused["fuseline"] == "failed with RuntimeError: the kernel image is invalid"
    assert contest.refused["fuseline-eager"].startswith("computes something else: loss_error 1")
    assert "there is no GPU" in contest.refused["reduce-overhead"]
    records = records_of(case, "fp32", contest, describe(CPU))
    skipped = {r.peer: r.case["reason"] for r in records if r.metric == "skipped"}
    assert skipped == contest.refused
    close(contest)
    assert not contest.outcomes


def test_ours_are_held_against_the_fastest_of_the_others() -> None:
    (case,) = find_cases(["encoder"], "small")
    model = nn.Linear(1, 1)
    times = {"eager": [9.0, 11.0, 10.0], "inductor": [4.0, 8.0, 6.0], "fuseline": [2.0, 2.0, 2.0]}
    outcomes = [
        Outcome(Contender(name, model, lambda: None), 3.0, 0.1, 1.5, {"loss_error": 0.01}, taken)
        for name, taken in times.items()
    ]
    records = records_of(case, "bf16", Contest(outcomes), describe(CPU))
    ratios = {r.peer: (r.value, r.n) for r in records if r.metric == "paired_speedup"}
    assert ratios == {"fuseline": (3.0, 3)}
    taken = {r.peer: r.value for r in records if r.metric == "iteration_ms"}
    assert taken == {"eager": 10.0, "inductor": 6.0, "fuseline": 2.0}
    assert {r.value for r in records if r.metric == "peak_memory_gib"} == {1.5}


def test_wrong_gradients_are_seen() -> None:
    (case,) = find_cases(["gpt2"], "small")

    def take(name: str, case: Case, made: Made) -> Contender:
        contender = enter("eager", case, made)
        step = contender.step

        def flipped() -> object:
            loss = step()
            with torch.no_grad():
                for parameter in made.model.parameters():
                    if name == "inductor" and parameter.grad is not None:
                        parameter.grad.neg_()
            return loss

        contender.step = flipped
        return contender

    contest = hold(case, ("eager", "inductor"), settings(), nothing, take=take)
    errors = [outcome.errors["grad_error"] for outcome in contest.outcomes]
    assert errors == [pytest.approx(0.0, abs=1e-6), pytest.approx(2.0, rel=1e-4)]
    close(contest)


@pytest.mark.parametrize("name", CASES)
def test_every_case_can_be_built(name: str) -> None:
    """The shrunk case differs from the full one in its sizes alone, and its batch fits its model."""
    (small,), (full,) = find_cases([name], "small"), find_cases([name], "full")
    assert (small.architecture, small.inputs, small.task, small.dropout) == (
        full.architecture,
        full.inputs,
        full.task,
        full.dropout,
    )
    made, twin = (make(small, CPU, "fp32", 3) for _ in range(2))
    assert all(
        torch.equal(p, q) for p, q in zip(made.model.parameters(), twin.model.parameters(), strict=True)
    )
    dropped = [part.p for part in made.model.modules() if isinstance(part, nn.Dropout) and part.p]
    assert made.model.training == small.trains
    assert not small.trains or set(dropped) <= {small.dropout}
    wanted = reference(small, CPU, "fp32", 3)
    if small.trains:
        assert math.isfinite(wanted.loss)
        assert (wanted.gradients is None) == bool(small.dropout)
    else:
        assert wanted.output.isfinite().all()


def test_what_finds_no_time_is_refused(tmp_path: Path) -> None:
    bench = AccelerationBench(CPU, ("gpt2", "encoder"), "small", "fp32", ("eager",), budget_s=1e-9)
    records = run(bench, tmp_path / "acceleration.jsonl", nothing)
    assert [(r.metric, r.case["reason"]) for r in records] == [("skipped", OUT_OF_TIME)] * 2


def test_a_process_that_dies_costs_one_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "ALONE", "fuseline.no_such_file")
    bench = AccelerationBench(CPU, ("gpt2", "encoder"), "small", "fp32", ("eager",), apart=True)
    records = run(bench, tmp_path / "acceleration.jsonl", nothing)
    assert [(r.case["model"], r.case["reason"]) for r in records] == [
        ("GPT-2, shrunk", "its process ended with code 1 and no times"),
        ("nn.TransformerEncoder 512 x 6, shrunk", "its process ended with code 1 and no times"),
    ]


@pytest.mark.full
def test_a_case_in_a_process_of_its_own(tmp_path: Path) -> None:
    peers = ("eager", "fuseline-eager")
    bench = AccelerationBench(
        CPU, ("encoder",), "small", "fp32", peers, seconds=0.05, budget_s=300, apart=True, drawn=1
    )
    records = run(bench, tmp_path / "acceleration.jsonl", nothing)
    cases = bench.found()
    assert len(cases) == 2
    timed = {(r.peer, r.case["seqlen_q"], r.case.get("drawn")) for r in records if r.metric == "iteration_ms"}
    assert timed == {(peer, case.seqlen, case.drawn or None) for peer in peers for case in cases}


@pytest.mark.slow
def test_compiled_models_take_their_turns(tmp_path: Path) -> None:
    peers = ("eager", "inductor", "fuseline-eager")
    bench = AccelerationBench(CPU, ("encoder", "gpt2"), "small", "fp32", peers, seconds=0.05)
    records = run(bench, tmp_path / "acceleration.jsonl", nothing)
    times = [r for r in records if r.metric == "iteration_ms"]
    assert len(times) == 6
    assert [r.value < 1e-5 for r in records if r.metric == "grad_error"] == [True] * 3


@pytest.mark.gpu
def test_ours_are_recorded_on_a_gpu(tmp_path: Path) -> None:
    cases, peers = ("encoder", "llama-1b", "bert-base-forward"), ("eager", "fuseline")
    bench = AccelerationBench(torch.device("cuda"), cases, "small", "bf16", peers, seconds=0.5)
    records = run(bench, tmp_path / "acceleration.jsonl", nothing)
    changes = [str(r.case["names"]) for r in records if r.metric == "kernels"]
    assert len(changes) == 3
    assert all(told.startswith("recorded, ") for told in changes)
    peaks = {(r.case["model"], r.peer): r.value for r in records if r.metric == "peak_memory_gib"}
    assert min(peaks.values()) > 0, peaks
    assert max(r.value for r in records if r.metric == "grad_error") < 0.05


def test_liger_changes_its_own_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of the model's file are Liger's within its turns, and their own outside of them."""
    file = types.ModuleType("a_model")
    exec("def rotate(x):\n    return x + 1", vars(file))
    monkeypatch.setitem(sys.modules, "a_model", file)

    class Model(nn.Module):
        config = types.SimpleNamespace(model_type="known")

        def forward(self, x: int) -> int:
            return file.rotate(x)

    Model.__module__ = "a_model"

    def patch(model: nn.Module) -> None:
        file.rotate = lambda x: x - 1
        file.added = 1
        model.forward = lambda x: 10 * file.rotate(x)

    package = types.ModuleType("liger_kernel.transformers.monkey_patch")
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {"known": patch}
    package._apply_liger_kernel_to_instance = lambda model: patch(model)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)

    changed, other = Model(), Model()
    assert liger.why_not_liger(changed) is None
    inside = liger.apply(changed)
    assert other(5) == 6
    with inside():
        assert changed(5) == 40
        assert hasattr(file, "added")
    assert other(5) == 6
    assert not hasattr(file, "added")
    assert liger.why_not_liger(nn.Linear(1, 1)) == "Liger has nothing for models of type Linear"


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(InputError, match="no case named 'llama'"):
        find_cases(["llama"], "small")
    with pytest.raises(InputError, match="preset"):
        find_cases([], "large")
    with pytest.raises(InputError, match="no peer named 'nobody'"):
        AccelerationBench(CPU, peers=("nobody",))
    with pytest.raises(InputError, match="precision"):
        AccelerationBench(CPU, dtype="fp8")
    with pytest.raises(InputError, match="--seconds 0"):
        AccelerationBench(CPU, seconds=0.0)
    with pytest.raises(InputError, match="--rounds 0"):
        AccelerationBench(CPU, rounds=0)
    assert set(DEFAULTS) == {*CONTENDERS} - {"max-autotune"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "bench",
        "acceleration",
        "--device",
        "cpu",
        "--cases",
        "encoder",
        "--peers",
        "eager,liger,fuseline",
    ]
    assert command([*arguments, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "nn.TransformerEncoder 512 x 6, shrunk, train, 2 x 16, dropout 0.1, fp32, on cpu:" in plan
    assert command([*arguments, "--drawn", "1", "--seconds", "0.02", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    listed, at_random = told.split("Models unchanged and accelerated, lengths drawn at random")
    assert "2 x 16" in listed
    assert "2 x 16" not in at_random
    assert "Sizes drawn at random, at which no kernel was tuned" in (tmp_path / "index.html").read_text()
    assert "fuseline: eager: the model is on cpu, which has no CUDA graphs" in told
    assert (tmp_path / "index.html").exists()
    assert command([*arguments, "--cases", "nothing"]) == 2
    assert "There is no case named 'nothing'" in capsys.readouterr().err
