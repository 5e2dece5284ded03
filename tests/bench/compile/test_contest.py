"""Taking turns: who runs when, what is paired with what, and who has to leave."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from fuseline.bench.compile import contest as contest_module
from fuseline.bench.compile.backends import BACKENDS, Backend
from fuseline.bench.compile.contender import Contender
from fuseline.bench.compile.contest import OUT_OF_TIME, Contest
from fuseline.bench.compile.outcome import Measured, Outcome, Settings
from fuseline.bench.compile.workloads import PRESETS
from fuseline.errors import InputError

EAGER, INDUCTOR, CUDAGRAPHS = (BACKENDS[name] for name in ("eager", "inductor", "cudagraphs"))
NEVER = math.inf


Script = Callable[[Backend, list[str]], Contender]
Maker = Callable[..., Contender]


def new_contest(
    monkeypatch: pytest.MonkeyPatch, script: Script, iterations: int = 20
) -> tuple[Contest, list[str]]:
    log: list[str] = []
    monkeypatch.setattr(contest_module, "prepare", lambda _w, backend, _d, _s: script(backend, log))
    settings = Settings(torch.device("cpu"), "fp32", iterations, seed=0)
    return Contest(PRESETS["small"]["vit"], None, settings, observe=lambda *_: None), log


def measured(outcome: Outcome) -> Measured:
    assert outcome.measured is not None, outcome.skipped
    return outcome.measured


def test_turns_go_there_and_back_and_the_ratio_is_eagers_time_over_the_others(
    monkeypatch: pytest.MonkeyPatch,
    scripted: Maker,
) -> None:
    speeds = {"eager": 3.0, "inductor": 2.0, "cudagraphs": 4.0}
    contest, log = new_contest(monkeypatch, lambda b, log: scripted(b, log, speeds[b.name]), iterations=11)
    for backend in (EAGER, INDUCTOR, CUDAGRAPHS):
        contest.admit(backend, NEVER)
    contest.take_turns(NEVER)
    assert log == ["eager 6", "inductor 6", "cudagraphs 6", "cudagraphs 5", "inductor 5", "eager 5"]
    outcomes = contest.outcomes()
    assert measured(outcomes["eager"]).paired is None
    inductor, cudagraphs = (measured(outcomes[n]) for n in ("inductor", "cudagraphs"))
    assert inductor.paired is not None
    assert cudagraphs.paired is not None
    assert (inductor.paired.value, inductor.paired.n) == (1.5, 2)
    assert cudagraphs.paired.value == 0.75
    assert len(inductor.times_ms) == 11


def test_a_companion_runs_short_blocks_and_has_no_outcome(
    monkeypatch: pytest.MonkeyPatch, scripted: Maker
) -> None:
    speeds = {"eager": 3.0, "inductor": 2.0}
    contest, log = new_contest(monkeypatch, lambda b, log: scripted(b, log, speeds[b.name]), iterations=1000)
    contest.admit(EAGER, NEVER, as_companion=True)
    contest.admit(INDUCTOR, NEVER)
    contest.take_turns(NEVER)
    assert log[:4] == ["eager 5", "inductor 50", "inductor 50", "eager 5"]
    (outcome,) = contest.outcomes().values()
    assert outcome.backend is INDUCTOR
    assert len(measured(outcome).times_ms) == 1000
    paired = measured(outcome).paired
    assert paired is not None
    assert (paired.value, paired.n) == (1.5, 20)
    assert measured(outcome).loss_error == 0.0


def test_a_companion_does_not_run_for_a_backend_that_failed(
    monkeypatch: pytest.MonkeyPatch, scripted: Maker
) -> None:
    def script(backend: Backend, log: list[str]) -> Contender:
        if backend is INDUCTOR:
            raise NotImplementedError("no compiler today")
        return scripted(backend, log, 1.0)

    contest, log = new_contest(monkeypatch, script)
    contest.admit(EAGER, NEVER, as_companion=True)
    contest.admit(INDUCTOR, NEVER)
    contest.take_turns(NEVER)
    assert contest.outcomes().keys() == {"inductor"}
    assert log == []


def test_a_companions_time_is_counted_before_a_deadline(
    monkeypatch: pytest.MonkeyPatch, scripted: Maker
) -> None:
    # 300 s: 100 iterations of the companion and 200 of the backend, of 1 s each.
    contest, _ = new_contest(monkeypatch, lambda b, log: scripted(b, log, 1000.0), iterations=1000)
    deadline = time.monotonic() + 300.5
    contest.admit(EAGER, deadline, as_companion=True)
    contest.admit(INDUCTOR, deadline)
    contest.take_turns(deadline)
    assert len(measured(contest.outcomes()["inductor"]).times_ms) in (199, 200)


def test_a_thousand_iterations_are_run_in_twenty_blocks(
    monkeypatch: pytest.MonkeyPatch, scripted: Maker
) -> None:
    contest, log = new_contest(monkeypatch, lambda b, log: scripted(b, log, 1.0), iterations=1003)
    contest.admit(EAGER, NEVER)
    contest.take_turns(NEVER)
    assert [int(line.split()[1]) for line in log] == [51] * 3 + [50] * 17


def test_a_backend_that_fails_leaves_with_the_reason_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
    scripted: Maker,
) -> None:
    class Breaking(scripted):  # type: ignore[misc, valid-type]
        def run(self, iterations: int) -> list[float]:
            raise RuntimeError("\nillegal recording\nmore")

    def script(backend: Backend, log: list[str]) -> Contender:
        if backend is CUDAGRAPHS:
            raise NotImplementedError("no graphs today")
        return Breaking(backend, log, 1.0) if backend is INDUCTOR else scripted(backend, log, 1.0)

    contest, log = new_contest(monkeypatch, script)
    for backend in (EAGER, INDUCTOR, CUDAGRAPHS):
        contest.admit(backend, NEVER)
    contest.take_turns(NEVER)
    outcomes = contest.outcomes()
    assert outcomes["cudagraphs"].skipped == "failed with NotImplementedError: no graphs today"
    assert outcomes["inductor"].skipped == "failed with RuntimeError: illegal recording"
    assert "inductor closed" in log
    assert len(measured(outcomes["eager"]).times_ms) == 20


def test_a_backend_with_another_loss_is_not_timed(monkeypatch: pytest.MonkeyPatch, scripted: Maker) -> None:
    losses = {"eager": 2.0, "inductor": 2.02, "cudagraphs": 2.2}
    contest, log = new_contest(monkeypatch, lambda b, log: scripted(b, log, 1.0, losses[b.name]))
    for backend in (EAGER, INDUCTOR, CUDAGRAPHS):
        contest.admit(backend, NEVER)
    contest.take_turns(NEVER)
    outcomes = contest.outcomes()
    assert measured(outcomes["inductor"]).loss_error == pytest.approx(0.01)
    assert outcomes["cudagraphs"].skipped == "computes something else: first loss 2.2000, eager 2.0000"
    assert not any(line.startswith("cudagraphs 5") for line in log)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told(
    monkeypatch: pytest.MonkeyPatch, scripted: Maker, loss: float
) -> None:
    contest, _ = new_contest(monkeypatch, lambda b, log: scripted(b, log, 1.0, loss))
    contest.admit(INDUCTOR, NEVER)
    contest.take_turns(NEVER)
    assert contest.outcomes()["inductor"].skipped == f"its loss was {loss} after 20 iterations"


def test_want_of_memory_and_bad_input_and_eagers_own_failures_go_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raising(error: Exception) -> Script:
        def script(backend: Backend, log: list[str]) -> Contender:
            raise error

        return script

    contest, _ = new_contest(monkeypatch, raising(RuntimeError("CUDA out of memory. Tried to allocate")))
    with pytest.raises(torch.OutOfMemoryError):
        contest.admit(INDUCTOR, NEVER)
    behind = RuntimeError("capture was invalidated")
    behind.__context__ = torch.OutOfMemoryError("full")
    contest, _ = new_contest(monkeypatch, raising(behind))
    with pytest.raises(torch.OutOfMemoryError):
        contest.admit(INDUCTOR, NEVER)
    contest, _ = new_contest(monkeypatch, raising(InputError("the corpus is shorter than a block")))
    with pytest.raises(InputError, match="shorter than a block"):
        contest.admit(INDUCTOR, NEVER)
    contest, _ = new_contest(monkeypatch, raising(KeyError("a mistake of ours")))
    with pytest.raises(KeyError):
        contest.admit(EAGER, NEVER)


def test_a_deadline_cuts_the_iterations_evenly(monkeypatch: pytest.MonkeyPatch, scripted: Maker) -> None:
    # 100 s for two backends of 1 s an iteration each: 50 iterations or one less, not 1000.
    contest, _ = new_contest(monkeypatch, lambda b, log: scripted(b, log, 1000.0), iterations=1000)
    deadline = time.monotonic() + 100
    for backend in (EAGER, INDUCTOR):
        contest.admit(backend, deadline)
    contest.take_turns(deadline)
    counts = {name: len(measured(outcome).times_ms) for name, outcome in contest.outcomes().items()}
    assert counts["eager"] == counts["inductor"]
    assert counts["eager"] in (49, 50)


def test_what_finds_no_time_is_skipped_and_told_so(monkeypatch: pytest.MonkeyPatch, scripted: Maker) -> None:
    contest, log = new_contest(monkeypatch, lambda b, log: scripted(b, log, 1000.0), iterations=1000)
    contest.admit(EAGER, NEVER)
    contest.admit(INDUCTOR, time.monotonic() - 1)
    contest.take_turns(time.monotonic() + 3)
    outcomes = contest.outcomes()
    assert outcomes["inductor"].skipped == OUT_OF_TIME
    assert outcomes["eager"].skipped == OUT_OF_TIME
    assert log == ["eager closed"]
