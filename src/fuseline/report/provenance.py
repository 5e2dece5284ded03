"""Where figures come from: the line under each of them, and the page's account of how it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fuseline.records import Record
from fuseline.report.blocks import Cell, Column, Row, Table, table
from fuseline.report.numbers import span
from fuseline.report.selection import grouped

MEDIANS = "medians with 95% intervals"
SIGMAS = "means; whiskers: one standard deviation"


def source(
    records: Iterable[Record], statistics: str = MEDIANS, samples: str = "n", *, subject: str = ""
) -> str:
    """What was run (`subject`), on which GPU with which versions, how often, and what the intervals are."""
    used = list(records)
    if not used:
        return ""
    if statistics == MEDIANS and all(r.low is None for r in used):
        statistics = "no intervals recorded"
    parts = [
        subject,
        _all(r.device for r in used),
        *_named("torch", (r.torch for r in used)),
        *_named("CUDA", (r.cuda for r in used)),
        *_named("fuseline", (r.fuseline for r in used)),
        *(
            f"{peer} {version}"
            for peer, version in dict.fromkeys((r.peer, r.peer_version) for r in used)
            if peer != "fuseline" and version and version != used[0].torch
        ),
        f"{samples} = {_counts(used)}",
        statistics,
    ]
    return " · ".join(part for part in parts if part)


def environments(records: Sequence[Record]) -> Table | None:
    """One row for each machine, set of versions and commit that records were taken with."""
    by_place = grouped(records, lambda r: (r.device, r.torch, r.cuda, r.fuseline, r.commit))
    rows = []
    for (device, torch, cuda, fuseline, commit), group in by_place.items():
        times = sorted(r.time for r in group)
        power = [r.power_w for r in group if r.power_w is not None]
        clocks = sorted({r.clocks for r in group if r.clocks}, key=lambda c: (len(c), c))
        rows.append(
            Row(
                (
                    Cell(device, _software(torch, cuda, fuseline)),
                    Cell(commit or "not known"),
                    _clocks(clocks),
                    Cell(span(min(power), max(power)) if power else ""),
                    Cell(_times(times[0], times[-1])),
                    Cell(str(len(group))),
                )
            )
        )
    columns = (
        Column("machine and versions", numeric=False),
        Column("commit", numeric=False),
        Column("clocks", "SM/memory, read right after the work", numeric=False),
        Column("power, W", "read right after the work"),
        Column("taken (UTC)", numeric=False),
        Column("records"),
    )
    return table("Machines and versions", columns, rows, "")


def notes(records: Sequence[Record], superseded: int) -> tuple[str, ...]:
    """What a careful reader wants to know before believing a figure."""
    metrics = {r.metric for r in records}
    said = [
        "A time is the median of its runs; brackets hold the distribution-free 95% interval of that median "
        "(the whole range where there are fewer than six runs). Compile time is counted apart."
    ]
    if metrics & {"speedup", "paired_speedup"}:
        said.append(
            "A paired ratio is the median of old/new over runs taken next to each other in the order "
            "A B B A, with a bootstrap 95% interval. Above 1 is faster; losses are shown as they are."
        )
    if metrics & {"mfu", "mfu_causal"}:
        said.append(
            "MFU is counted twice: 6N + 12LCT FLOPs a token, as the PaLM paper and nanoGPT do, and "
            "6N + 6LCT, which counts only the attention a causal mask leaves. Both are shares of the GPU's "
            "dense bf16 peak, whatever the precision. A device whose peak is not known has no MFU."
        )
    if "peak_memory_gib" in metrics:
        said.append("Peak memory is what the allocator handed out, not what it reserved.")
    if metrics & {"share_of_copy", "bandwidth_gbs"}:
        said.append(
            "Bandwidth counts each input read once and each output written once; its share is of the copy "
            "bandwidth measured in the same process."
        )
    if metrics & {"loss_error", "grad_error", "error"}:
        said.append(
            "Errors are relative: norm(out - reference) / norm(reference). The reference is float64 for an "
            "op, fp32 on the same batch for a rung's loss and gradients."
        )
    if any((r.commit or "").endswith("-dirty") for r in records):
        said.append("A commit that ends in -dirty had changes in its tree that were not committed.")
    if superseded:
        one = "One older record of a figure that was measured again is left out."
        many = f"{superseded} older records of figures that were measured again are left out."
        said.append(one if superseded == 1 else many)
    return tuple(said)


def _software(torch: str, cuda: str | None, fuseline: str) -> str:
    return " · ".join([f"torch {torch}", *([f"CUDA {cuda}"] if cuda else []), f"fuseline {fuseline}"])


def _all(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _named(name: str, values: Iterable[str | None]) -> list[str]:
    known = _all(v for v in values if v)
    return [f"{name} {known}"] if known else []


def _counts(records: Sequence[Record]) -> str:
    counts = [r.n for r in records]
    return span(min(counts), max(counts))


def _clocks(clocks: list[str]) -> Cell:
    if len(clocks) < 2:
        return Cell(clocks[0] if clocks else "")
    return Cell(f"{clocks[0]} to {clocks[-1]}")


def _times(first: str, last: str) -> str:
    """`2026-11-20 10:02 to 10:31`, from ISO times in UTC."""
    day, begin = first[:10], first[11:16]
    end = last[11:16] if last[:10] == day else f"{last[:10]} {last[11:16]}"
    return f"{day} {begin}" if first[:16] == last[:16] else f"{day} {begin} to {end}"
