"""What was measured of an op, as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fuseline.bench.ops.measure import CaseResult, Timing
from fuseline.bench.peers import Peer
from fuseline.records import Environment, Record
from fuseline.records.record import Scalar
from fuseline.timing import Summary

SUITE = "ops"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def case_records(
    results: Sequence[CaseResult], case: Mapping[str, Scalar], copy_gbs: float, environment: Environment
) -> list[Record]:
    """Of every peer: error, time, bandwidth, share of the copy bandwidth, and its time over ours."""
    records = []
    for result in results:
        if result.skipped is not None:
            records.append(skip_record(result.peer, result.skipped, case, environment))
        for timing in result.timings:
            records += _timing_records(result, timing, case, copy_gbs, environment)
    return records


def skip_record(peer: Peer, reason: str, case: Mapping[str, Scalar], environment: Environment) -> Record:
    """A peer that was not measured, and why."""
    return Record.of(SUITE, {**case, "reason": reason}, "skipped", None, environment, peer=peer.name)


def host_record(peer: Peer, host_us: Summary, case: Mapping[str, Scalar], environment: Environment) -> Record:
    """What one eager forward call costs the host."""
    return Record.of(
        SUITE,
        {**case, "direction": "fw", "captured": False},
        "host_us",
        host_us.median,
        environment,
        peer=peer.name,
        peer_version=peer.version(),
        low=host_us.low,
        high=host_us.high,
        n=host_us.n,
    )


def copy_record(copy_gbs: float, environment: Environment) -> Record:
    """The copy bandwidth that the shares are of."""
    return Record.of(SUITE, {"op": "copy"}, "bandwidth_gbs", copy_gbs, environment, peer="copy")


def _timing_records(
    result: CaseResult,
    timing: Timing,
    case: Mapping[str, Scalar],
    copy_gbs: float,
    environment: Environment,
) -> list[Record]:
    place = {**case, "direction": timing.direction, "captured": timing.captured}
    time = timing.time_us
    bandwidth = [timing.bytes_moved / us / 1e3 for us in (time.median, time.high, time.low)]
    figures: list[tuple[str, float, float | None, float | None]] = [
        ("time_us", time.median, time.low, time.high),
        ("bandwidth_gbs", bandwidth[0], bandwidth[1], bandwidth[2]),
        ("share_of_copy", bandwidth[0] / copy_gbs, bandwidth[1] / copy_gbs, bandwidth[2] / copy_gbs),
    ]
    if timing.paired is not None:
        ratio = timing.paired
        figures.append(("paired_speedup", ratio.value, ratio.low, ratio.high))
    if result.errors is not None and not timing.captured:
        error = result.errors.forward if timing.direction == "fw" else result.errors.backward
        figures.append(("error", error, None, None))
    return [
        Record.of(
            SUITE,
            place,
            metric,
            value,
            environment,
            peer=result.peer.name,
            peer_version=result.peer.version(),
            low=low,
            high=high,
            n=time.n,
        )
        for metric, value, low, high in figures
    ]
