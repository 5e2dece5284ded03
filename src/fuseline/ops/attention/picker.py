"""Which kernel computes attention, why, and how to choose another: `fuseline.picker`.

    print(fuseline.picker.explain(q, k, v, causal=True))
    with fuseline.picker.use("flash"): ...
    with fuseline.picker.forbid("cudnn"): ...
    FUSELINE_ATTENTION=flash python train.py        (or -cudnn to forbid it)
    fuseline tune --preset gpt2                      (measures, and keeps the times)
    with fuseline.picker.tuning(): ...               (measures each new shape before its first call)
    with fuseline.picker.compiling(): ...            (may pick FlexAttention, which compiles each new shape)

`use` and `forbid` apply to the whole process while they are open, also to what torch.compile traces
meanwhile; it traces again when they change. The environment variable is read when a call is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from fuseline.errors import InputError
from fuseline.ops.attention import choice, table_store
from fuseline.ops.attention.call import make_call
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.choice import PICK, SETTINGS, decide
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tables import Entry

Observer = Callable[[str, int, int], None]
"""Called with the problem that is being measured, how many are done, and how many there are."""


@dataclass(frozen=True)
class Considered:
    """One candidate for one call.

    `reason` says why it could not be picked (None: it could). `time_us` is its time if this very problem was
    measured, `estimated_us` the time that the estimate predicts from other problems.
    """

    name: str
    summary: str
    reason: str | None
    time_us: float | None
    estimated_us: float | None


@dataclass(frozen=True)
class Explanation:
    """Which candidate was picked for a call and why, and all others. Printing it shows a table."""

    problem: Problem
    picked: str
    why: str
    considered: tuple[Considered, ...]

    def __str__(self) -> str:
        lines = [str(self.problem), f"picked: {self.picked} ({self.why})"]
        for one in self.considered:
            mark = "*" if one.name == self.picked else " "
            known = []
            if one.time_us is not None:
                known.append(f"{one.time_us:.1f} us")
            if one.estimated_us is not None:
                known.append(f"about {one.estimated_us:.3g} us")
            if one.reason is not None:
                known.append(one.reason)
            lines.append(f" {mark} {one.name:<12}{'; '.join(known) or 'it can, and was not measured'}")
        return "\n".join(lines)


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backend: str = PICK, **options: Any
) -> Explanation:
    """Explain what `ops.attention` would run for the same arguments, and why. It computes nothing.

    Raises InputError as `ops.attention` does.
    """
    if backend not in choice.names():
        choice.check_name(backend)
    problem = make_call(q, k, v, **options).problem()
    return explain_problem(problem, backend)


def explain_problem(problem: Problem, backend: str = PICK) -> Explanation:
    """The same for a problem without tensors."""
    decision = decide(problem, backend, SETTINGS.used, SETTINGS.forbidden)
    times = {**_known(problem), **decision.times_us}
    considered = tuple(
        Considered(
            name,
            candidate.summary,
            None if name == decision.name else decision.refused.get(name) or candidate.refuses(problem),
            times.get(name),
            decision.estimated_us.get(name),
        )
        for name, candidate in CANDIDATES.items()
    )
    return Explanation(problem, decision.name, decision.why, considered)


def _known(problem: Problem) -> dict[str, float]:
    """Times of this very problem: those of this machine, else those in the package's table."""
    gpu = table_store.gpu_name(problem.device)
    found: dict[str, float] = {}
    for table in (table_store.shipped(gpu), table_store.measured_here(gpu)):
        entry = table.find(problem)
        found.update({} if entry is None else entry.times_us)
    return found


class use:  # noqa: N801
    """While the context is open, compute attention only with `names`: with the fastest of them."""

    def __init__(self, *names: str) -> None:
        if not names:
            raise InputError("picker.use needs the name of at least one candidate.")
        for name in names:
            choice.check_name(name)
        self._names = names

    def __enter__(self) -> None:
        self._before = SETTINGS.used
        SETTINGS.used = self._names

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        SETTINGS.used = self._before


class forbid:  # noqa: N801
    """While the context is open, compute attention with none of `names`."""

    def __init__(self, *names: str) -> None:
        for name in names:
            choice.check_name(name)
        self._names = names

    def __enter__(self) -> None:
        self._before = SETTINGS.forbidden
        SETTINGS.forbidden = (*self._before, *self._names)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        SETTINGS.forbidden = self._before


class compiling:  # noqa: N801
    """Allow candidates that compile each new shape for seconds (FlexAttention) in eager calls.

    They are picked where the estimate says that they are the fastest. Under torch.compile they are allowed
    anyway.
    """

    def __enter__(self) -> None:
        self._before = SETTINGS.compile
        SETTINGS.compile = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        SETTINGS.compile = self._before


class tuning:  # noqa: N801
    """Measure each shape that is new on this machine before its first call, and keep its times.

    Measuring takes a fraction of a second. Nothing is measured while a CUDA graph is captured. Choices that
    were made before are made again.
    """

    def __enter__(self) -> None:
        self._before = SETTINGS.tune
        SETTINGS.tune = lambda problem: tune([problem])
        choice.forget()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        SETTINGS.tune = self._before


def tune(
    problems: Iterable[Problem],
    *,
    with_compiled: bool = False,
    observe: Observer = lambda now, done, total: None,
) -> list[Entry]:
    """Measure all candidates on `problems` and keep the times; from now on the picker uses them.

    It leaves the state of torch's generators as it was. `with_compiled` also measures FlexAttention and other
    candidates that compile each shape for seconds.
    Raises InputError without a GPU.
    """
    # Imported here: measuring draws tensors and calls `attention`, which imports what this file explains.
    from fuseline.ops.attention.measure import measure, release

    wanted = list(dict.fromkeys(problems))
    found = []
    for number, problem in enumerate(wanted):
        gpu = table_store.gpu_name(problem.device)
        if gpu is None:
            raise InputError(
                f"Times are kept for GPUs; {problem.device} is not one. On a CPU the picker follows its rule."
            )
        observe(str(problem), number, len(wanted))
        generators = [problem.device] if problem.device.type == "cuda" else []
        with torch.random.fork_rng(generators):
            times = measure(problem, with_compiled=with_compiled)
        entry = Entry(problem, times.times_us)
        if times.times_us:
            table_store.save(gpu, [entry])
            choice.forget()
        found.append(entry)
    release()
    observe("done", len(wanted), len(wanted))
    return found
