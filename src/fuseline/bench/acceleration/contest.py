"""All contenders of one case: made ready one by one, then timed in turn, A B C, C B A, in one process."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fuseline.bench.acceleration.case import Case
from fuseline.bench.acceleration.contenders import Contender, RefusedError, enter, why_not
from fuseline.bench.acceleration.errors import Reference, errors_of, reference, why_wrong
from fuseline.bench.acceleration.models import make
from fuseline.bench.failure import describe_failure
from fuseline.errors import InputError
from fuseline.timing import (
    peak_memory_gib,
    ran_out_of_memory,
    recorded_graphs_gib,
    reset_peak_memory,
    synchronize,
    time_steps,
)

WARM_UP = 3  # after the first step: a recording is replayed by then, and the compiler has no more to do
FEWEST_ROUNDS = 6  # under six there is no 95% interval of a median
MOST_STEPS = 1000
OUT_OF_TIME = "the time budget was used up before its turn"

Observer = Callable[[Case, str, str], None]
"""`observe(case, contender, phase)`; phases: "reference", "prepare", "run", "skip"."""


@dataclass(frozen=True)
class Settings:
    """What the contenders of every case share. `seconds` is the time for timing a case, all turns of all
    contenders together, in `rounds` turns each."""

    device: torch.device
    dtype: str
    seconds: float
    rounds: int
    seed: int


@dataclass
class Outcome:
    """What one contender took: of a step in each of its turns, and until its steps were fast."""

    contender: Contender
    ready_s: float
    warm_s: float
    peak_gib: float | None
    errors: dict[str, float]
    times_ms: list[float] = field(default_factory=list)


@dataclass
class Contest:
    """The outcomes of a case, and why each of the others has none."""

    outcomes: list[Outcome] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def hold(
    case: Case,
    names: Sequence[str],
    settings: Settings,
    observe: Observer,
    *,
    deadline: float = math.inf,
    take: Callable[..., Contender] = enter,
) -> Contest:
    """Time the contenders of a case. No new one is made ready after `deadline` (of `time.monotonic`). What
    fails is refused with its reason and costs the others nothing, unless it broke the device."""
    contest = Contest()
    observe(case, "float32", "reference")
    try:
        wanted = reference(case, settings.device, settings.dtype, settings.seed)
    except Exception as error:  # no model of it can be made here
        contest.refused.update(dict.fromkeys(names, _reason(error)))
        return contest
    for name in names:
        reason = why_not(name, settings.device)
        if reason is None and time.monotonic() >= deadline:
            reason = OUT_OF_TIME
        if reason is None:
            observe(case, name, "prepare")
            try:
                contest.outcomes.append(_prepare(case, name, settings, wanted, take))
            except Exception as error:  # a peer may raise anything at all
                reason = _reason(error)
        if reason is not None:
            observe(case, name, "skip")
            contest.refused[name] = reason
    del wanted
    _take_turns(case, contest, settings, observe)
    return contest


def close(contest: Contest) -> None:
    """Let go of the models and all that was recorded of them."""
    for outcome in contest.outcomes:
        outcome.contender.close()
    contest.outcomes.clear()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _prepare(
    case: Case, name: str, settings: Settings, wanted: Reference, take: Callable[..., Contender]
) -> Outcome:
    device = settings.device
    gc.collect()  # what a refused one left is not on this one's account
    synchronize(device)
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # nor what a recording of this one would give back
    graphs = recorded_graphs_gib(device)
    before = torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    contender = take(name, case, make(case, device, settings.dtype, settings.seed))
    with contender.inside():
        first, first_s = _timed(contender.step, 1, device)
        errors = errors_of(first, contender.model, wanted)
        if reason := why_wrong(errors, case.dropout):
            raise RefusedError(reason)
        del first
        # What searched, proved, compiled and recorded is past: this is what every further step needs.
        reset_peak_memory(device)
        _, warm_s = _timed(contender.step, WARM_UP, device)
    peak = peak_memory_gib(device)
    if peak is not None:
        peak += recorded_graphs_gib(device) - graphs - before
    contender.model.zero_grad(set_to_none=True)
    ready_s = contender.seconds + first_s + warm_s
    # Losses of two masks differ by chance: they say that it is the same computation, and no more.
    return Outcome(contender, ready_s, warm_s / WARM_UP, peak, {} if case.dropout else errors)


def _timed(step: Callable[[], object], steps: int, device: torch.device) -> tuple[object, float]:
    """What the last of so many steps returns, and the seconds they take together."""
    begin = time.perf_counter()
    for _ in range(steps):
        last = step()
    synchronize(device)
    return last, time.perf_counter() - begin


def _take_turns(case: Case, contest: Contest, settings: Settings, observe: Observer) -> None:
    """In every round each contender has one turn, of one step that is not timed and some that are."""
    rounds = max(FEWEST_ROUNDS, settings.rounds)
    per_step = sum(outcome.warm_s for outcome in contest.outcomes)
    if not per_step:
        return
    steps = min(MOST_STEPS, max(1, round(settings.seconds / rounds / per_step) - 1))
    begin = time.monotonic()
    for number in range(rounds):
        for outcome in contest.outcomes[:: 1 if number % 2 == 0 else -1]:
            contender = outcome.contender
            observe(case, contender.name, "run")
            try:
                with contender.inside():
                    contender.step()
                    outcome.times_ms.append(time_steps(contender.step, settings.device, steps=steps))
                contender.model.zero_grad(set_to_none=True)
            except Exception as error:
                contest.outcomes.remove(outcome)
                contest.refused[contender.name] = _reason(error)
        if number + 1 >= FEWEST_ROUNDS and time.monotonic() - begin >= settings.seconds:
            return


def _reason(error: Exception) -> str:
    if isinstance(error, (RefusedError, InputError)):
        return str(error)
    if ran_out_of_memory(error):
        return "does not fit in this device's memory beside the others"
    return describe_failure(error)
