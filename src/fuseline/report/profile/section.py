"""A profiled step as a section of a page: what to do next, the kinds, the timeline, the roofline, the
tables."""

from __future__ import annotations

from fuseline.profiling import Profile
from fuseline.profiling.text import next_thing
from fuseline.report.blocks import Block, Details, Drawing, Headline, Section, Words
from fuseline.report.charts import Figure
from fuseline.report.numbers import percent, plain
from fuseline.report.profile import figures, tables

MIB = 2**20
TASKS = {"train": "training step", "forward": "forward pass", "decode": "decoding step"}


def section(profile: Profile) -> Section:
    """All of it; what a profile lacks is left out."""
    blocks: list[Block | None] = [
        _headline(profile),
        Words(next_thing(profile)),
        *(Words(note) for note in profile.notes),
        Drawing(figures.kinds(profile)),
        tables.kinds(profile),
        Drawing(figures.timeline(profile)),
        _drawn(figures.floors(profile)),
        _drawn(figures.roofline(profile)),
        tables.kernels(profile),
        tables.gaps(profile),
        _drawn(figures.memory(profile)),
        tables.memory(profile),
        tables.fusions(profile),
        _breaks(profile),
        _recompilations(profile),
    ]
    made = tuple(block for block in blocks if block is not None)
    return Section("profile", title(profile), profile.environment.device, next_thing(profile), made)


def title(profile: Profile) -> str:
    """`gpt2: training step, batch 16 x 1024, bf16, inductor`."""
    case = profile.case
    what = case.get("preset") or case.get("checkpoint") or case.get("model") or "A step"
    task = TASKS.get(str(case.get("task")), "")
    size = f"batch {case['batch']} × {case['seqlen_q']}" if "batch" in case and "seqlen_q" in case else ""
    rest = [task, size, str(case.get("dtype") or ""), str(case.get("execution") or "")]
    told = ", ".join(filter(None, rest))
    return f"{what}: {told}" if told else str(what)


def _drawn(figure: Figure | None) -> Drawing | None:
    return None if figure is None else Drawing(figure)


def _headline(profile: Profile) -> Headline:
    whole, waiting = profile.whole_ms, profile.waiting_ms
    saving = sum(row.saving_ms or 0.0 for row in profile.by_kind())
    tiles = [
        ("device at work", f"{plain(profile.busy_ms)} ms", percent(profile.busy_ms / whole)),
        (
            "waits for the host" if profile.on_gpu else "Python between ops",
            f"{plain(waiting)} ms",
            percent(waiting / whole),
        ),
        ("above the floors", f"{plain(saving)} ms", "what could be saved at most"),
    ]
    if profile.memory is not None:
        tiles.append(("peak memory", f"{plain(profile.memory.bytes / MIB)} MiB", ""))
    rates = [f"copy {plain(profile.ceilings.copy_gbs)} GB/s"]
    rates += [f"{dtype} products {plain(rate)} TFLOP/s" for dtype, rate in profile.ceilings.tflops.items()]
    time = profile.step_ms
    return Headline(
        f"{plain(time.median)} ms",
        "a step by the clock, with no profiler at work",
        tuple(tiles),
        f"{time.n} runs, {plain(time.low)} to {plain(time.high)} ms; measured beside it: {', '.join(rates)}",
    )


def _breaks(profile: Profile) -> Details | None:
    if not profile.graph_breaks:
        return None
    items = tuple((one.place, one.reason) for one in profile.graph_breaks)
    return Details(f"Graph breaks: {len(items)}", items, unfolded=True)


def _recompilations(profile: Profile) -> Details | None:
    if not profile.recompilations:
        return None
    items = tuple((f"{one.function}, {one.place}", one.reason) for one in profile.recompilations)
    return Details(f"Compiled again: {len(items)}", items, unfolded=True)
