"""A profile as records of the suite `profile`: the step, each kind of work, each kernel that matters."""

from __future__ import annotations

from collections.abc import Iterator

from fuseline.profiling.profile import Profile, Row
from fuseline.records import Record
from fuseline.records.record import Scalar

SUITE = "profile"
KERNELS = 40  # the kernels with most to save; the rest is in their kinds


def records_of(profile: Profile) -> list[Record]:
    """Milliseconds a step by the clock; then of each kind and kernel its milliseconds, its share of its floor
    and what it could save; the peak of the memory. The kind `waiting` is the time without work."""
    case = dict(profile.case)
    time, n = profile.step_ms, len(profile.samples)
    records = [_record(profile, case, "iteration_ms", time.median, low=time.low, high=time.high, n=time.n)]
    for row in profile.by_kind():
        records += _of_row(profile, {**case, "kind": row.kind}, row, n)
    for row in profile.by_kernel()[:KERNELS]:
        records += _of_row(
            profile, {**case, "kind": row.kind, "kernel": row.name, "places": row.places}, row, n
        )
    if profile.memory is not None:
        records.append(_record(profile, case, "peak_memory_gib", profile.memory.bytes / 2**30))
    return records


def _of_row(profile: Profile, case: dict[str, Scalar], row: Row, n: int) -> Iterator[Record]:
    case = {**case, "calls": row.calls}
    yield _record(profile, case, "kernel_ms", row.ms, low=row.low, high=row.high, n=n)
    if row.share_of_floor is not None:
        yield _record(profile, case, "share_of_floor", row.share_of_floor)
    if row.saving_ms is not None:
        yield _record(profile, case, "saving_ms", row.saving_ms)


def _record(
    profile: Profile,
    case: dict[str, Scalar],
    metric: str,
    value: float,
    low: float | None = None,
    high: float | None = None,
    n: int = 1,
) -> Record:
    return Record.of(SUITE, case, metric, value, profile.environment, low=low, high=high, n=n)
