"""Models that people use: as they came, by each of the others, and accelerated."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from fuseline.timing import geometric_mean
from tables.front import TASKS
from tables.markdown import named, newest, source, table

OTHERS = ("eager", "inductor", "reduce-overhead", "max-autotune", "liger")
OURS = ("fuseline-eager", "fuseline")


def acceleration(records: Sequence[Record]) -> list[str]:
    """Milliseconds a step by each, the paired ratio of the fastest of the others to ours, and memory; nothing
    where there are no records. Lengths drawn at random have a table of their own."""
    listed = [r for r in records if not r.case.get("drawn")]
    at_random = _lines([r for r in records if r.case.get("drawn")])
    lines = _lines(listed)
    if at_random:
        lines += ["", "The same at lengths drawn at random, at which no kernel was tuned:", "", *at_random]
    return [*lines, "", source(records)] if lines else []


def _lines(records: Sequence[Record]) -> list[str]:
    times, memory = newest(records, "iteration_ms", _place), newest(records, "peak_memory_gib", _place)
    ready = newest(records, "compile_s", _place)
    ratios: dict[tuple[object, ...], Record] = {
        _place(r): r
        for r in sorted(records, key=lambda r: r.time)
        if r.metric == "paired_speedup" and r.peer == "fuseline"
    }
    if not times:
        return []
    peers = [peer for peer in (*OTHERS, *OURS) if any(peer in found for found in times.values())]
    body = []
    for where, found in times.items():
        model, task, batch, length, _, dropout = where[1:]
        name = f"{model}, {TASKS.get(str(task), task)}, {batch} x {length}"
        cells = [name + (f", dropout {dropout}" if dropout else "")]
        cells += [f"{found[peer]:.2f}" if peer in found else "" for peer in peers]
        ratio = ratios.get(where)
        cells.append(f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "")
        cells += [f"{memory.get(where, {}).get(peer, 0.0):.1f}" for peer in ("eager", "fuseline")]
        cells.append(f"{ready[where]['fuseline']:.0f}" if "fuseline" in ready.get(where, {}) else "")
        body.append(cells)
    mean = geometric_mean(r.value for r in ratios.values() if r.value) if ratios else 0.0
    if ratios:
        body.append(["geometric mean", *([""] * len(peers)), f"**{mean:.2f}x**", "", "", ""])
    head = [f"{NAMES.get(peer, named(peer))}, ms" for peer in peers]
    tail = ["best of the others over `training_step`", "eager, GiB", "Fuseline, GiB", "ready after, s"]
    return table(["model", *head, *tail], body)


NAMES = {"fuseline": "recorded, ours", "fuseline-eager": "accelerated, own loop"}


def _place(r: Record) -> tuple[object, ...]:
    keys = ("model", "task", "batch", "seqlen_q", "dtype", "dropout")
    return (r.device, *(r.case.get(key) for key in keys))
