"""What one measurement of the hardware is, before it becomes records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fuseline.records import Environment, Record
from fuseline.records.record import Scalar
from fuseline.timing import Summary

SUITE = "hardware"


@dataclass(frozen=True)
class Figure:
    """`section` is the part of the suite, `what` the thing measured; value with its 95% interval."""

    section: str
    what: str
    metric: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 1
    peer: str = "fuseline"
    case: Mapping[str, Scalar] = field(default_factory=dict)

    def record(self, environment: Environment) -> Record:
        return Record.of(
            SUITE,
            {"section": self.section, "what": self.what, **self.case},
            self.metric,
            self.value,
            environment,
            peer=self.peer,
            low=self.low,
            high=self.high,
            n=self.n,
        )


def rate(section: str, what: str, metric: str, amount: float, time: Summary, **rest: object) -> Figure:
    """`amount` over the median time; the slowest runs are the low end of the interval."""
    ends = amount / time.median, amount / time.high, amount / time.low
    return Figure(section, what, metric, *ends, n=time.n, **rest)  # type: ignore[arg-type]


def skipped(section: str, what: str, reason: str, peer: str = "fuseline") -> Figure:
    """Something that this machine or its software cannot do."""
    return Figure(section, what, "skipped", None, peer=peer, case={"reason": reason})
