"""Backends that share a device and take turns on it: A B, B A, A B, ..."""

from __future__ import annotations

import math
import statistics
import time

import torch

from fuseline.bench.compile.backends import BASELINE, Backend
from fuseline.bench.compile.contender import Contender, prepare
from fuseline.bench.compile.outcome import Measured, Observer, Outcome, Settings
from fuseline.bench.compile.workloads import Workload
from fuseline.bench.failure import describe_failure
from fuseline.data.token_files import TokenDataset
from fuseline.errors import InputError
from fuseline.timing import paired_ratio, ran_out_of_memory

ROUNDS = 20
SHORTEST_BLOCK = 5
MOST_BESIDE = ROUNDS * SHORTEST_BLOCK  # iterations of a companion
FEWEST_ITERATIONS = 6  # under six there is no 95% interval of a median
LARGEST_LOSS_ERROR = 0.05  # a first loss further from eager's than this is another computation
OUT_OF_TIME = "the time budget was used up before its turn; --resume runs it"


class Contest:
    """Admit backends one by one, let them take turns, ask for the outcomes.

    A companion is there so that the others' times have a ratio to its own: it runs short blocks, is not told
    of, and has no outcome. A backend that fails is out, with the reason; `torch.OutOfMemoryError` alone goes
    through to the caller, who can try with fewer.
    """

    def __init__(
        self, workload: Workload, dataset: TokenDataset | None, settings: Settings, observe: Observer
    ) -> None:
        self._workload, self._dataset = workload, dataset
        self._settings, self._observe = settings, observe
        self._contenders: dict[str, Contender] = {}
        self._blocks_ms: dict[str, list[float]] = {}
        self._out: dict[str, Outcome] = {}
        self._companions: set[str] = set()

    def admit(self, backend: Backend, deadline: float, *, as_companion: bool = False) -> None:
        """Build and warm up `backend`, and hold its first loss against eager's."""
        if as_companion:
            self._companions.add(backend.name)
        self._tell(backend, "prepare", 0)
        if time.monotonic() >= deadline:
            self._leave(backend, OUT_OF_TIME)
            return
        try:
            contender = prepare(self._workload, backend, self._dataset, self._settings)
        except Exception as error:
            self._leave(backend, _reason(backend, error))
            return
        self._contenders[backend.name] = contender
        loss_error = self._loss_error(contender)
        if loss_error is not None and not loss_error <= LARGEST_LOSS_ERROR:
            eager_loss = self._contenders[BASELINE].first_loss
            self._leave(
                backend,
                f"computes something else: first loss {contender.first_loss:.4f}, eager {eager_loss:.4f}",
            )

    def take_turns(self, deadline: float) -> None:
        """Run the admitted in blocks, there and back; a round that ends past `deadline` is the last."""
        blocks = self._plan(deadline) if self._timed else []
        done = 0
        for number, iterations in enumerate(blocks):
            turns = list(self._contenders.values())
            done += iterations
            for contender in turns if number % 2 == 0 else reversed(turns):
                is_companion = contender.backend.name in self._companions
                try:
                    times_ms = contender.run(min(iterations, SHORTEST_BLOCK) if is_companion else iterations)
                except Exception as error:
                    self._leave(contender.backend, _reason(contender.backend, error))
                    continue
                self._blocks_ms.setdefault(contender.backend.name, []).append(statistics.fmean(times_ms))
                self._tell(contender.backend, "run", done)
            if time.monotonic() >= deadline or not self._timed:
                break
        for contender in list(self._contenders.values()):
            if not math.isfinite(contender.last_loss):
                self._leave(contender.backend, f"its loss was {contender.last_loss} after {done} iterations")

    def outcomes(self) -> dict[str, Outcome]:
        """By name, of every backend that was admitted or turned away, companions left out."""
        eager_ms = self._blocks_ms.get(BASELINE) if BASELINE in self._contenders else None
        for name, contender in self._contenders.items():
            paired = None
            if eager_ms is not None and name != BASELINE:
                paired = paired_ratio(eager_ms, self._blocks_ms[name])
            self._out[name] = Outcome(
                contender.backend,
                Measured(
                    times_ms=contender.times_ms,
                    waits_ms=contender.waits_ms,
                    compile_s=contender.compile_s,
                    peak_memory_gib=contender.peak_memory_gib,
                    loss_error=self._loss_error(contender),
                    paired=paired,
                ),
            )
        return {name: outcome for name, outcome in self._out.items() if name not in self._companions}

    def close(self) -> None:
        for contender in self._contenders.values():
            contender.close()
        self._contenders.clear()

    def _plan(self, deadline: float) -> list[int]:
        """Iterations of each block: as many in all as were asked for, or as the deadline leaves time for."""
        iterations = self._settings.iterations
        if math.isfinite(deadline):
            iterations = min(iterations, self._affordable(deadline - time.monotonic()))
        if iterations < min(FEWEST_ITERATIONS, self._settings.iterations):
            for contender in list(self._contenders.values()):
                self._leave(contender.backend, OUT_OF_TIME)
            return []
        rounds = max(1, min(ROUNDS, iterations // SHORTEST_BLOCK))
        return [iterations // rounds + (number < iterations % rounds) for number in range(rounds)]

    def _affordable(self, seconds: float) -> int:
        """Iterations that there is time for, a companion's shorter blocks beside them."""
        timed_s = sum(contender.warm_ms for contender in self._timed) / 1e3
        beside_s = sum(contender.warm_ms for contender in self._contenders.values()) / 1e3 - timed_s
        in_step = seconds / (timed_s + beside_s)
        return int(in_step if in_step <= MOST_BESIDE else (seconds - MOST_BESIDE * beside_s) / timed_s)

    @property
    def _timed(self) -> list[Contender]:
        return [c for name, c in self._contenders.items() if name not in self._companions]

    def _loss_error(self, contender: Contender) -> float | None:
        eager = self._contenders.get(BASELINE)
        if eager is None or contender is eager:
            return None
        return abs(contender.first_loss - eager.first_loss) / abs(eager.first_loss)

    def _leave(self, backend: Backend, reason: str) -> None:
        contender = self._contenders.pop(backend.name, None)
        if contender is not None:
            contender.close()
        self._out[backend.name] = Outcome(backend, skipped=reason)
        self._tell(backend, "skip", 0)

    def _tell(self, backend: Backend, phase: str, done: int) -> None:
        if backend.name in self._companions:
            return
        self._observe(self._workload.name, backend.name, phase, done, self._settings.iterations)


def _reason(backend: Backend, error: Exception) -> str:
    """What to say of `backend`, which raised `error`.

    A compiler may raise anything, and the other backends still count. What is raised on: want of memory, bad
    input, and whatever eager raises, for then it is not a backend that is at fault.
    """
    if ran_out_of_memory(error):
        raise torch.OutOfMemoryError(str(error)) from error
    if isinstance(error, InputError) or backend.name == BASELINE:
        raise error
    return describe_failure(error)
