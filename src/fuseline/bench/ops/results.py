"""What was measured of an op, as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fuseline.bench.ops.measure import CaseResult, Timing
from fuseline.bench.peers import Peer
from fuseline.records import Environment, Record
from fuseline.records.record import Scalar
from fuseline.timing import Summary

SUITE = "ops"
MATRIX_BOUND = ("linear_cross_entropy", "mlp")  # what they move says nothing of how fast they can be

Figure = tuple[float, float | None, float | None]
"""Value, low, high."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Ceiling:
    """What shares are of: the copy bandwidth, and in a CUDA graph the time of an empty kernel besides."""

    copy_gbs: float
    empty_kernel_us: float | None = None

    def floor_us(self, bytes_moved: int) -> float | None:
        """Nothing that is one kernel and moves so many bytes takes less."""
        if self.empty_kernel_us is None:
            return None
        return bytes_moved / self.copy_gbs / 1e3 + self.empty_kernel_us


def case_records(
    results: Sequence[CaseResult], case: Mapping[str, Scalar], ceiling: Ceiling, environment: Environment
) -> list[Record]:
    """Of every peer: error, time, bandwidth, shares of the ceilings, and its time over ours."""
    records = []
    for result in results:
        if result.skipped is not None:
            records.append(skip_record(result.peer, result.skipped, case, environment))
        for timing in result.timings:
            records += _timing_records(result, timing, case, ceiling, environment)
    return records


def skip_record(peer: Peer, reason: str, case: Mapping[str, Scalar], environment: Environment) -> Record:
    """A peer that was not measured, and why."""
    return Record.of(SUITE, {**case, "reason": reason}, "skipped", None, environment, peer=peer.name)


def host_record(
    peer: Peer, direction: str, host_us: Summary, case: Mapping[str, Scalar], environment: Environment
) -> Record:
    """What one eager call costs the host: forward, or forward and backward."""
    place = {**case, "direction": direction, "captured": False}
    return _record(
        peer, place, "host_us", (host_us.median, host_us.low, host_us.high), host_us.n, environment
    )


def ceiling_records(ceiling: Ceiling, environment: Environment) -> list[Record]:
    """The ceilings that the shares are of."""
    records = [Record.of(SUITE, {"op": "copy"}, "bandwidth_gbs", ceiling.copy_gbs, environment, peer="copy")]
    if ceiling.empty_kernel_us is not None:
        case: dict[str, Scalar] = {"op": "empty kernel", "captured": True}
        records.append(Record.of(SUITE, case, "time_us", ceiling.empty_kernel_us, environment, peer="aten"))
    return records


def _timing_records(
    result: CaseResult,
    timing: Timing,
    case: Mapping[str, Scalar],
    ceiling: Ceiling,
    environment: Environment,
) -> list[Record]:
    time = timing.time_us
    spread = (time.median, time.high, time.low)  # from the slowest to the fastest for all that time divides
    figures: list[tuple[str, Figure]] = [("time_us", (time.median, time.low, time.high))]
    if str(case["op"]) in MATRIX_BOUND:
        figures.append(("tflops", _over(timing.flops / 1e6, spread)))
    else:
        figures.append(("bandwidth_gbs", _over(timing.bytes_moved / 1e3, spread)))
        figures.append(("share_of_copy", _over(timing.bytes_moved / 1e3 / ceiling.copy_gbs, spread)))
        if timing.captured and (floor := ceiling.floor_us(timing.bytes_moved)) is not None:
            figures.append(("share_of_floor", _over(floor, spread)))
    if timing.paired is not None:
        figures.append(("paired_speedup", (timing.paired.value, timing.paired.low, timing.paired.high)))
    if result.errors is not None and not timing.captured:
        error = result.errors.forward if timing.direction == "fw" else result.errors.backward
        figures.append(("error", (error, None, None)))
    if result.peak_memory_gib is not None and timing.direction == "fwbw" and not timing.captured:
        figures.append(("peak_memory_gib", (result.peak_memory_gib, None, None)))
    place = {**case, "direction": timing.direction, "captured": timing.captured}
    return [_record(result.peer, place, metric, figure, time.n, environment) for metric, figure in figures]


def _over(amount: float, times: tuple[float, float, float]) -> Figure:
    median, high, low = times
    return amount / median, amount / high, amount / low


def _record(
    peer: Peer, place: Mapping[str, Scalar], metric: str, figure: Figure, n: int, environment: Environment
) -> Record:
    value, low, high = figure
    return Record.of(
        SUITE,
        place,
        metric,
        value,
        environment,
        peer=peer.name,
        peer_version=peer.version(),
        low=low,
        high=high,
        n=n,
    )
