"""What the machine can do: the ceilings that shares are measured against."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from tables.markdown import table

UNITS = {"bandwidth_gbs": "GB/s", "tflops": "TFLOP/s", "latency_ns": "ns", "time_us": "us"}
KINDS = {
    "bandwidth": "bandwidth, {}",
    "matrix": "matrix product, {}",
    "latency": "latency, {}",
    "call": "{}",
}


def hardware(records: Sequence[Record]) -> list[str]:
    """Bandwidths, matrix rates and latencies, the best of each."""
    found: dict[str, tuple[float, str]] = {}
    for r in records:
        kind = KINDS.get(str(r.case.get("section")))
        if kind is None or r.metric not in UNITS or r.value is None:
            continue
        name = kind.format(r.case["what"])
        rate = r.metric in ("bandwidth_gbs", "tflops")
        if name not in found or (r.value > found[name][0]) == rate:
            found[name] = r.value, UNITS[r.metric]
    body = [
        [name, f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"]
        for name, (value, unit) in found.items()
    ]
    return table(["ceiling", "measured"], body)
