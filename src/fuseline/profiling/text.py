"""A profile in words and tables of plain text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fuseline.profiling.names import short
from fuseline.profiling.places import together
from fuseline.profiling.profile import WAITING, Profile, Row

MOST = 20
NAME = 64
PLACES = 3  # as many as a sentence names
MIB = 2**20


def as_text(profile: Profile, most: int = MOST) -> str:
    """The tables of a profile, the longest of them cut to `most` rows."""
    parts = [headline(profile), next_thing(profile), _kinds(profile), _kernels(profile, most)]
    parts += [_gaps(profile, most // 2), _memory(profile, most // 2), _compiled(profile, most // 2)]
    return "\n\n".join(filter(None, [*parts, *profile.notes]))


def headline(profile: Profile) -> str:
    """What ran, how long a step takes, and what the device does in it."""
    what = ", ".join(f"{name} {value}" for name, value in profile.case.items() if value not in (None, ""))
    tflops = ", ".join(
        f"{dtype} products {rate:,.3g} TFLOP/s" for dtype, rate in profile.ceilings.tflops.items()
    )
    machine = f"Measured here: copy {profile.ceilings.copy_gbs:,.4g} GB/s" + (f", {tflops}" if tflops else "")
    time = f"{profile.step_ms.median:.4g} ms a step by the clock"
    if profile.on_gpu:
        time += f": the GPU is busy for {profile.busy_ms:.4g} ms and waits for {profile.waiting_ms:.3g} ms"
    else:
        time += f", {profile.whole_ms:.4g} ms with the profiler at work"
    return "\n".join(
        filter(None, (f"{profile.environment.device}. {what}".rstrip(". ") + ".", f"{time}.", f"{machine}."))
    )


def next_thing(profile: Profile) -> str:
    """The one line that says what to do next."""
    kernels = [row for row in profile.by_kernel() if row.saving_ms]
    waiting = profile.waiting_ms
    if kernels and (kernels[0].saving_ms or 0.0) >= waiting:
        row = kernels[0]
        where = f" ({few(row.places)})" if row.places else ""
        above = f"{row.ms:.3g} ms, {row.saving_ms:.3g} ms above its floor"
        return f"Next: {short(row.name)[:NAME]}{where}, {row.kind}: {above}."
    if waiting > 0:
        gaps = profile.gaps_by_place()
        where = f", most before {gaps[0].where}" if gaps else ""
        who = "the GPU waits for the host" if profile.on_gpu else "Python runs between the ops"
        return f"Next: {who} for {waiting:.3g} ms of the step{where}."
    return ""


def few(places: str) -> str:
    """The first few of these places, and how many more there are."""
    named = places.split(", ")
    left = len(named) - PLACES
    return ", ".join(named[:PLACES]) + (f" and {left} more" if left > 0 else "")


def _kinds(profile: Profile) -> str:
    rows = [(kind_name(row, profile), str(row.calls), *_figures(row)) for row in profile.by_kind()]
    return table("By kind of work", ("kind", "calls", *_FIGURES), rows)


def _kernels(profile: Profile, most: int) -> str:
    every = profile.by_kernel()
    rows = [
        (
            short(row.name)[:NAME],
            row.kind,
            str(row.calls),
            *_figures(row),
            row.places[:NAME] or row.ops[:NAME],
        )
        for row in every[:most]
    ]
    what = "kernel" if profile.on_gpu else "op"
    title = f"By {what}" + (f" (the first {most} of {len(every)})" if len(every) > most else "")
    return table(title, (what, "kind", "calls", *_FIGURES, "where"), rows, left=(0, 1, 9))


def _gaps(profile: Profile, most: int) -> str:
    rows = [
        (
            row.where[:NAME],
            row.part,
            str(row.count),
            f"{row.ms:.3f}",
            f"{row.waited_ms:.3f}",
            str(row.launches),
        )
        for row in profile.gaps_by_place()[:most]
        if row.ms >= 0.001
    ]
    if profile.on_gpu:
        title, waited = "Gaps: the GPU has nothing to do before", "waits for the host"
    else:
        title, waited = "Between ops: Python runs before", "of it Python"
    return table(title, ("what comes next", "part", "gaps", "ms", waited, "launches"), rows, left=(0, 1))


def _memory(profile: Profile, most: int) -> str:
    memory = profile.memory
    if memory is None:
        return ""
    kinds = ", ".join(f"{kind} {size / MIB:,.1f}" for kind, size in memory.by_kind().items())
    at = ", ".join(filter(None, (memory.op, memory.place)))
    rows = [
        (holder.kind, f"{holder.bytes / MIB:,.1f}", holder.op[:NAME], holder.place[:NAME])
        for holder in memory.holders[:most]
    ]
    title = f"Memory at the peak{f' (in {at})' if at else ''}: {memory.bytes / MIB:,.1f} MiB. {kinds}"
    return table(title, ("what", "MiB", "taken by", "where"), rows, left=(0, 2, 3))


def _compiled(profile: Profile, most: int) -> str:
    parts = []
    generated = [f for f in profile.fusions if f.is_generated]
    if generated:
        kernels: dict[str, list[str]] = {}
        operations: dict[str, str] = {}
        for fusion in generated:
            kernels.setdefault(fusion.kernel, []).extend(fusion.places)
            operations.setdefault(fusion.kernel, ", ".join(fusion.operations))
        rows = [(k[:NAME], operations[k][:NAME], together(p)[:NAME]) for k, p in list(kernels.items())[:most]]
        title = f"Fused by inductor: {len(kernels)} kernels" + (
            f", the first {most}" if len(kernels) > most else ""
        )
        parts.append(table(title, ("kernel", "operations in it", "where"), rows, left=(0, 1, 2)))
    if profile.graph_breaks:
        lines = [f"  {b.place}: {b.reason}" for b in profile.graph_breaks]
        parts.append("\n".join(["Graph breaks", *lines]))
    if profile.recompilations:
        lines = [f"  {r.function} ({r.place}): {r.reason}" for r in profile.recompilations]
        parts.append("\n".join(["Compiled again", *lines]))
    return "\n\n".join(parts)


_FIGURES = ("ms", "share", "GB", "TFLOP", "of floor", "could save, ms")


def _figures(row: Row) -> tuple[str, ...]:
    return (
        f"{row.ms:.3f}",
        f"{row.share:.1%}",
        "" if row.bytes is None else f"{row.bytes / 1e9:.3g}",
        "" if row.flops is None else f"{row.flops / 1e12:.3g}",
        "" if row.share_of_floor is None else f"{row.share_of_floor:.2f}",
        "" if row.saving_ms is None else f"{row.saving_ms:.3f}",
    )


def kind_name(row: Row, profile: Profile) -> str:
    if row.kind != WAITING:
        return row.name
    return "waiting for the host" if profile.on_gpu else "Python between ops"


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Nothing without rows. Columns are numbers, which stand right, but those in `left`."""
    lines = [tuple(head), *map(tuple, rows)]
    if len(lines) == 1:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    drawn = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([title, *(f"  {line}" for line in drawn)])
