"""The tables of a profiled step."""

from __future__ import annotations

from fuseline.profiling import Profile
from fuseline.profiling.names import short
from fuseline.profiling.places import together
from fuseline.profiling.profile import Row
from fuseline.profiling.text import kind_name
from fuseline.report.blocks import EMPTY, Cell, Column, Table, breakable, table
from fuseline.report.blocks import Row as Line
from fuseline.report.numbers import percent, plain, whole
from fuseline.report.profile.figures import ROLES

MOST, FEW = 40, 15
MIB = 2**20

GPU_UNITS, CPU_UNITS = (("GB", 1e9), ("TFLOP", 1e12)), (("MB", 1e6), ("GFLOP", 1e9))


def _columns(profile: Profile) -> tuple[Column, ...]:
    (size, _), (work, _) = _units(profile)
    return (
        Column("calls"),
        Column("ms a step", "median of the recorded steps, 95% interval below it"),
        Column("share", "of the step"),
        Column("of floor", "floor over time: 100% is as fast as the machine allows"),
        Column("could save, ms", "time above the floor"),
        Column(size, "each input read once, each output written once"),
        Column(work),
    )


def _units(profile: Profile) -> tuple[tuple[str, float], tuple[str, float]]:
    return GPU_UNITS if profile.on_gpu else CPU_UNITS


def kinds(profile: Profile) -> Table | None:
    rows = [
        Line((Cell(kind_name(row, profile), swatch=ROLES.get(row.kind, "other")), *_figures(row, profile)))
        for row in profile.by_kind()
    ]
    columns = (Column("kind", numeric=False), *_columns(profile))
    return table("By kind of work", columns, rows, "", "Sorted by what could be saved at the floor.")


def kernels(profile: Profile) -> Table | None:
    every = profile.by_kernel()
    rows = [
        Line(
            (
                Cell(breakable(short(row.name)), row.kind, swatch=ROLES.get(row.kind, "other")),
                *_figures(row, profile),
                Cell(breakable(row.places, 80), row.ops if row.ops != row.name else ""),
            )
        )
        for row in every[:MOST]
    ]
    what = "kernel" if profile.on_gpu else "op"
    cut = f" The first {MOST} of {len(every)}." if len(every) > MOST else ""
    columns = (Column(what, numeric=False), *_columns(profile), Column("where", numeric=False))
    return table(f"By {what}", columns, rows, "", f"Sorted by what could be saved at the floor.{cut}")


def gaps(profile: Profile) -> Table | None:
    rows = [
        Line(
            (
                Cell(breakable(row.where), row.part),
                Cell(whole(row.count)),
                Cell(plain(row.ms)),
                Cell(plain(row.waited_ms)),
                Cell(whole(row.launches)) if profile.on_gpu else EMPTY,
            )
        )
        for row in profile.gaps_by_place()[:FEW]
        if row.ms >= 0.001
    ]
    columns = (
        Column("what comes next", numeric=False),
        Column("gaps"),
        Column("ms"),
        Column("of it the host", "the next kernel was not launched yet")
        if profile.on_gpu
        else Column("Python, ms"),
        Column("launches", "that fall into the gaps"),
    )
    title = "When the GPU waits" if profile.on_gpu else "Between the ops"
    reading = (
        "The profiler lengthens what the host does: believe the places more than the milliseconds, and of "
        "the whole the figure at the top."
    )
    return table(title, columns, rows, "", reading)


def memory(profile: Profile) -> Table | None:
    if profile.memory is None:
        return None
    rows = [
        Line(
            (
                Cell(holder.kind),
                Cell(plain(holder.bytes / MIB)),
                Cell(breakable(holder.op)),
                Cell(breakable(holder.place)),
            )
        )
        for holder in profile.memory.holders[:FEW]
        if holder.bytes >= 0.001 * profile.memory.bytes
    ]
    columns = (
        Column("what", numeric=False),
        Column("MiB"),
        Column("taken by", numeric=False),
        Column("where", numeric=False),
    )
    return table("What holds it", columns, rows, "", "Tensors of layers that are alike are added up.")


def fusions(profile: Profile) -> Table | None:
    """What inductor fused, a row for each kernel that it wrote."""
    places: dict[str, list[str]] = {}
    operations: dict[str, str] = {}
    calls: dict[str, int] = {}
    for fusion in profile.fusions:
        if fusion.is_generated:
            places.setdefault(fusion.kernel, []).extend(fusion.places)
            operations.setdefault(fusion.kernel, ", ".join(fusion.operations))
            calls[fusion.kernel] = calls.get(fusion.kernel, 0) + 1
    rows = [
        Line(
            (
                Cell(breakable(kernel)),
                Cell(whole(calls[kernel])),
                Cell(breakable(together(held), 80), operations[kernel]),
            )
        )
        for kernel, held in places.items()
    ]
    columns = (
        Column("kernel", numeric=False),
        Column("calls"),
        Column("where, and what is in it", numeric=False),
    )
    return table("What inductor fused", columns, rows, "", folded=len(rows) > FEW)


def _figures(row: Row, profile: Profile) -> tuple[Cell, ...]:
    saving = EMPTY if row.saving_ms is None else Cell(plain(row.saving_ms))
    interval = f"[{plain(row.low)}, {plain(row.high)}]" if row.high > row.low else ""
    (_, size), (_, work) = _units(profile)
    return (
        Cell(whole(row.calls)),
        Cell(plain(row.ms), interval),
        Cell(percent(row.share)),
        EMPTY if row.share_of_floor is None or not row.floor_ms else Cell(percent(row.share_of_floor)),
        saving,
        EMPTY if not row.bytes else Cell(plain(row.bytes / size)),
        EMPTY if not row.flops else Cell(plain(row.flops / work)),
    )
