"""What was measured of a problem, as records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fuseline.ops.attention.measure import Times
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.work import bytes_moved, flops
from fuseline.records import Environment, Record
from fuseline.records.record import Scalar

SUITE = "attention"
PICK = "pick"


@dataclass(frozen=True)
class Ceilings:
    """What shares are of: GB/s of a large copy, and TFLOP/s of a large product by bytes of a number."""

    copy_gbs: float
    matrix_tflops: Mapping[int, float]

    def floor_us(self, problem: Problem) -> float:
        """Nothing that moves these bytes and does these products takes less."""
        moving = bytes_moved(problem) / self.copy_gbs / 1e3
        rate = self.matrix_tflops.get(problem.dtype.itemsize)
        return max(moving, flops(problem) / rate / 1e6) if rate else moving


RATES: Mapping[str, Callable[[Problem, Ceilings], float]] = {
    "tflops": lambda problem, ceilings: flops(problem) / 1e6,
    "bandwidth_gbs": lambda problem, ceilings: bytes_moved(problem) / 1e3,
    "share_of_floor": lambda problem, ceilings: ceilings.floor_us(problem),
}
"""What there is to do: over the microseconds it is the rate."""


@dataclass
class Result:
    """One problem by all candidates: times, errors, GiB beside the inputs, and what was picked."""

    times: Times
    picked: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    memory_gib: dict[str, float] = field(default_factory=dict)
    tuned: str | None = None
    """What an earlier measurement of the same problem would have the picker take."""

    @property
    def share_of_best(self) -> float | None:
        """The fastest candidate's time over that of the picked one."""
        return self.share_of(self.picked)

    def share_of(self, name: str | None) -> float | None:
        times = self.times.times_us
        taken = None if name is None else times.get(name)
        return None if taken is None else min(times.values()) / taken


def case_of(problem: Problem, suite: str) -> dict[str, Scalar]:
    """The case of a record; what is not there is left out."""
    case: dict[str, Scalar] = {
        "section": suite,
        "batch": problem.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "direction": problem.direction,
        "causal": problem.causal,
        "captured": problem.device.type == "cuda",
    }
    if problem.is_windowed:
        case["window"] = f"{problem.window_left},{problem.window_right}"
    if problem.mask != "none":
        case["mask"] = f"{problem.mask} {problem.mask_dims}".strip()
    if problem.dropout_p:
        case["dropout"] = problem.dropout_p
    for name in ("sequences", "max_seqlen_q", "max_seqlen_k", "soft_cap", "sinks", "seeded", "lse"):
        if value := getattr(problem, name):
            case[name] = value
    return case


def records_of(result: Result, suite: str, ceilings: Ceilings, environment: Environment) -> list[Record]:
    """Of every candidate and of the pick: time, rates, share of the floor, error, memory; or why not. The
    picker's many problems are records of time and error alone."""
    problem = result.times.problem
    case = case_of(problem, suite)
    records = [
        Record.of(SUITE, {**case, "reason": reason}, "skipped", None, environment, peer=name)
        for name, reason in result.times.failed.items()
    ]
    peers = {name: name for name in result.times.times_us}
    if result.picked in peers:
        peers[PICK] = str(result.picked)
    for peer, name in peers.items():
        metrics = ("time_us",) if suite == "picker" else ("time_us", *RATES)
        for metric in metrics:
            value, low, high, n = _clocked(result.times, name, metric, ceilings)
            records.append(
                Record.of(SUITE, case, metric, value, environment, peer=peer, low=low, high=high, n=n)
            )
        others = {"error": result.errors.get(name)}
        if suite != "picker":
            others["peak_memory_gib"] = result.memory_gib.get(name)
        if peer == PICK:
            others["share_of_best"] = result.share_of_best
        records += [
            Record.of(SUITE, case, metric, value, environment, peer=peer)
            for metric, value in others.items()
            if value is not None
        ]
    share = result.share_of(result.tuned)
    if share is not None:
        tuned = {**case, "tuned": True}
        records.append(Record.of(SUITE, tuned, "share_of_best", share, environment, peer=PICK))
    return records


def _clocked(
    times: Times, name: str, metric: str, ceilings: Ceilings
) -> tuple[float, float | None, float | None, int]:
    """A metric of a time, its interval and the number of runs: one that is far behind has no interval."""

    def told(time_us: float) -> float:
        return time_us if metric == "time_us" else RATES[metric](times.problem, ceilings) / time_us

    value, samples = told(times.times_us[name]), times.samples_us.get(name)
    if samples is None:
        return value, None, None, 1
    low, high = sorted((told(samples.low), told(samples.high)))
    return value, low, high, samples.n


def ceiling_records(ceilings: Ceilings, environment: Environment) -> list[Record]:
    case: dict[str, Scalar] = {"section": "ceilings"}
    made = [Record.of(SUITE, case, "bandwidth_gbs", ceilings.copy_gbs, environment, peer="copy")]
    for itemsize, rate in ceilings.matrix_tflops.items():
        dtype = "bfloat16" if itemsize == 2 else "float32"
        made.append(Record.of(SUITE, {**case, "dtype": dtype}, "tflops", rate, environment, peer="aten"))
    return made


def matrix_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32,)
