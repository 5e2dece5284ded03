"""How a rung is measured: probed, timed in turn with what it is compared with, checked, looked into.

All of it happens in one process on one stream of real batches. Two steps are alive at most: the one being
measured and the one it is paired with.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from statistics import median

import torch

from fuseline.bench.ladder.contender import LEAD_IN, Batch, Contender
from fuseline.bench.ladder.effort import Effort, OutOfTimeError, Pace
from fuseline.bench.ladder.events import LossPoint, Observer, Stage
from fuseline.bench.ladder.kernels_seen import kernels_seen
from fuseline.bench.ladder.pairing import Runs, run_in_turn
from fuseline.bench.ladder.result import WIDE, Figure, Measurement
from fuseline.bench.ladder.spec import Spec
from fuseline.bench.ladder.workload import Workload
from fuseline.timing import (
    paired_ratio,
    peak_memory_gib,
    ran_out_of_memory,
    recorded_graphs_gib,
    reset_peak_memory,
    summarize,
    synchronize,
)

GIB = 2**30
OUT_OF_MEMORY = "out of memory"
REASON_LENGTH = 200
# Where an interval is wide: how often runs are made again at most, and how many times its share of the
# ladder's time the rung may take for it.
REPEATS = 3
REPEATED_SHARE = 2.0
# Seconds besides the timed runs (building, compiling, checking), before anything is known of this machine.
EXPECTED_SECONDS: dict[str, dict[str, float]] = {
    "cpu": {"eager": 3.0, "inductor": 60.0},
    "cuda": {
        "eager": 5.0,
        "cudagraphs": 20.0,
        "inductor": 60.0,
        "reduce-overhead": 60.0,
        "max-autotune-no-cudagraphs": 240.0,
        "max-autotune": 240.0,
        "graph": 8.0,
        "recorded": 40.0,
        "inductor-graph": 60.0,
    },
}


class StepMeasurer:
    """Measures training steps on `device`; a `climb.Measurer`. Close it when the climb is over."""

    def __init__(
        self,
        device: torch.device,
        workload: Workload,
        effort: Effort,
        observer: Observer,
    ) -> None:
        self._device = device
        self._workload = workload
        self._effort = effort
        self._observer = observer
        self._old: Contender | None = None
        self._new: Contender | None = None
        self._seen_seconds: dict[str, list[float]] = {}
        self._least_seconds = 0.0  # of timing a pair, as the last one told

    def fixed_seconds(self, spec: Spec) -> float:
        seen = self._seen_seconds.get(spec.execution)
        before = median(seen) if seen else EXPECTED_SECONDS[self._device.type][spec.execution]
        return before + self._least_seconds

    def measure(self, spec: Spec, against: Spec | None, *, seconds: float, limit: float) -> Measurement:
        """See `climb.Measurer`. A rung that does not fit in memory beside its pair is timed alone."""
        begin = time.monotonic()
        note = self._bring(against)
        found = self._guarded(spec, begin, seconds, limit)
        if found.reason and found.reason.startswith(OUT_OF_MEMORY) and self._old is not None:
            self._drop(old=True, new=True)
            note = "timed alone: it did not fit in memory beside the rung it is compared with"
            found = self._guarded(spec, begin, seconds, limit)
        return replace(found, note="; ".join(filter(None, (note, found.note))))

    def compare(self, spec: Spec, against: Spec, *, seconds: float, limit: float) -> Figure | None:
        """See `climb.Measurer`. None unless `spec` is still alive and the two fit beside each other."""
        begin = time.monotonic()
        alive = next((c for c in (self._new, self._old) if c is not None and c.spec == spec), None)
        if alive is None:
            return None
        self._drop(old=self._old is not alive, new=self._new is not alive)
        self._old, self._new = None, alive
        self._observer(Stage("comparing the ends of the climb"))
        try:
            self._old = self._raise(against)
            runs = self._time(alive, seconds, limit - (time.monotonic() - begin))
            return Figure.of(paired_ratio(runs.old, runs.new))
        except (RuntimeError, ValueError, OutOfTimeError):
            return None  # the ratio of the two medians stands

    def close(self) -> None:
        """Let go of all models and their memory."""
        self._drop(old=True, new=True)

    def _bring(self, against: Spec | None) -> str:
        """Have `against`, and nothing else, alive as the old step. What was measured last often is it.
        Returns why it is not, where it cannot be."""
        if self._new is not None and self._new.spec == against:
            self._drop(old=True)
            self._old, self._new = self._new, None
        self._drop(new=True, old=self._old is not None and self._old.spec != against)
        if against is None or self._old is not None:
            return ""
        self._observer(Stage("building the rung to compare with"))
        try:
            self._old = self._raise(against)
            return ""
        except (RuntimeError, ValueError) as error:
            told = f"timed alone: the rung it is compared with could not be built again ({_told(error)})"
        self._free()
        return told

    def _guarded(self, spec: Spec, begin: float, seconds: float, limit: float) -> Measurement:
        """`_measure`, with what this machine cannot do told as a reason."""
        try:
            return self._measure(spec, begin, seconds, limit)
        except OutOfTimeError as error:
            found = Measurement(reason=str(error), out_of_budget=True)
        except (RuntimeError, ValueError) as error:
            found = Measurement(reason=_told(error))
        # Not before the exception and the frames it held are gone can their memory be freed.
        self._drop(new=True)
        return found

    def _measure(self, spec: Spec, begin: float, seconds: float, limit: float) -> Measurement:
        others, graphs = self._allocated(), recorded_graphs_gib(self._device)
        reset_peak_memory(self._device)
        self._observer(Stage("compiling" if spec.is_compiled else "building"))
        new = self._new = self._raise(spec)
        peaks = {spec.batch: self._peak(others)}
        timing = time.monotonic()
        runs = self._time(new, seconds, limit - (timing - begin))
        timing = time.monotonic() - timing

        figures = self._workload.figures(new, runs)
        if new.step.compile_seconds:
            figures["compile_s"] = Figure(new.step.compile_seconds)
        half = None if peaks[spec.batch] is None else self._workload.halved(new)
        if half is not None:
            peaks[len(half[0])] = self._peak_of(new, half, others)
        elif peaks[spec.batch] is not None:
            peaks[spec.batch] = self._peak_of_later_step(new, others, graphs)
        known = {batch: peak for batch, peak in peaks.items() if peak is not None}
        if known:
            figures["peak_memory_gib"] = Figure(known[spec.batch])
        self._observer(Stage("comparing with fp32"))
        errors, batch = self._workload.check(new)
        figures.update(errors)
        self._observer(Stage("listing kernels"))
        seen = kernels_seen(lambda: new.step(batch), self._device)
        self._seen_seconds.setdefault(spec.execution, []).append(time.monotonic() - begin - timing)
        return Measurement(figures=figures, kernels=seen.names, work=seen.work, note=new.note, peaks=known)

    def _raise(self, spec: Spec) -> Contender:
        contender = self._workload.build(spec)
        try:
            contender.warm_up(self._workload.batches(spec))
        except BaseException:
            contender.close()
            raise
        return contender

    def _time(self, new: Contender, seconds: float, limit: float) -> Runs:
        """Probe, choose how much fits, run in turn with the old step; the learner goes on with `new`."""
        begin, learner = time.monotonic(), self._workload.learner
        batches = self._workload.batches(new.spec)
        both = [c for c in (new, self._old) if c is not None]
        pair_ms = sum(min(c.run(batches, 1).ms for _ in range(2)) for c in both)
        pace = Pace(self._effort, pair_ms / 1e3, seconds, limit)
        self._least_seconds = pair_ms / 1e3 * self._effort.runs * (LEAD_IN + 1)
        self._workload.begin(new)

        def tell(run: int, step: int, loss: float) -> None:
            self._observer(Stage("timing", run, pace.runs))
            self._observer(LossPoint(step, loss))

        found = run_in_turn(new, self._old, batches, learner, pace, after_run=tell)
        for _ in range(REPEATS):
            # A machine that is busy with something else: measured again until the answer is narrow.
            spent = time.monotonic() - begin
            left = min(REPEATED_SHARE * seconds, limit) - spent
            pair_ms = found.pair_ms
            self._least_seconds = pair_ms / 1e3 * self._effort.runs * (LEAD_IN + 1)
            if not _is_wide(found) or left < self._least_seconds:
                break
            again = Pace(self._effort, pair_ms / 1e3, left, left)
            found.add(run_in_turn(new, self._old, batches, learner, again, found.taken, after_run=tell))
        self._workload.end(new, found)
        return found

    def _peak_of(self, contender: Contender, batch: Batch, others: int) -> float | None:
        synchronize(self._device)
        contender.optimizer.zero_grad(set_to_none=True)
        reset_peak_memory(self._device)
        contender.step(batch)
        return self._peak(others)

    def _peak_of_later_step(self, contender: Contender, others: int, graphs: float) -> float | None:
        """Of a step after all that proves, compiles and records, with what its recorded graphs hold. Others'
        graphs hold `graphs` GiB."""
        synchronize(self._device)
        reset_peak_memory(self._device)
        contender.run(self._workload.batches(contender.spec), 1)
        peak = self._peak(others)
        return None if peak is None else peak + recorded_graphs_gib(self._device) - graphs

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _peak(self, others: int) -> float | None:
        """Peak since the last reset in GiB, less the bytes that others held then."""
        synchronize(self._device)
        peak = peak_memory_gib(self._device)
        return None if peak is None else peak - others / GIB

    def _drop(self, *, old: bool = False, new: bool = False) -> None:
        going = [c for c, goes in ((self._old, old), (self._new, new)) if goes and c is not None]
        self._old, self._new = None if old else self._old, None if new else self._new
        staying = [c for c in (self._old, self._new) if c is not None]
        for contender in going:
            contender.close()
        if any(c.spec.is_compiled for c in going) and not any(c.spec.is_compiled for c in staying):
            torch.compiler.reset()  # torch's own CUDA graphs keep their memory until then
        self._free()

    def _free(self) -> None:
        """Have what nobody holds any more given back."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _is_wide(runs: Runs) -> bool:
    """Whether the interval of what is decided by, the paired ratio where there is one, says too little."""
    found = Figure.of(paired_ratio(runs.old, runs.new) if runs.old else summarize(runs.new))
    return found.spread > WIDE


def _told(error: BaseException) -> str:
    """One line of it, enough to go on."""
    if ran_out_of_memory(error):
        return OUT_OF_MEMORY
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[0] if lines else type(error).__name__
    return told if len(told) <= REASON_LENGTH else told[: REASON_LENGTH - 3] + "..."
