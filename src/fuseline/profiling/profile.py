"""A profiled step: its pieces with their kinds, places and floors, its gaps, its memory, and tables of them.

    print(profile)             the tables
    profile.by_kind()          a row for each kind of work
    profile.by_kernel()        a row for each kernel (on a CPU: each op)

Rows are sorted by the milliseconds that would be saved at the floor: the first says what to do next. The
floor of a piece is the larger of its bytes over the measured copy bandwidth and its FLOPs over the measured
rate of products in its dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fuseline.profiling.ceilings import Ceilings
from fuseline.profiling.compiled import Fusion, GraphBreak, Recompilation
from fuseline.profiling.memory import PeakMemory
from fuseline.profiling.places import pattern, together
from fuseline.records import Environment
from fuseline.records.record import Scalar
from fuseline.timing import Summary, summarize

WAITING = "waiting"
"""The kind of the time in which the device has nothing to do; on a CPU, in which no op runs."""
NO_TIME = 0.0005  # milliseconds under which a row is nothing to speak of


@dataclass(frozen=True)
class Entry:
    """A piece of the step as shown: times in microseconds from the step's start. `us` is its share of the
    busy time, `elapsed_us` how long it ran; `bytes`, `flops` and `floor_us` are None if not
    known."""

    name: str
    kind: str
    begin_us: float
    us: float
    elapsed_us: float
    op: str = ""
    place: str = ""
    part: str = ""
    lane: int = 0
    bytes: float | None = None
    flops: float | None = None
    dtype: str = ""
    floor_us: float | None = None

    @property
    def saving_us(self) -> float | None:
        return None if self.floor_us is None else max(0.0, self.us - self.floor_us)


@dataclass(frozen=True)
class Gap:
    """A time without work, in microseconds from the step's begin: `waited_us` of it for the host. `launches`
    fall into it, and the op `op` at `place` ends it."""

    begin_us: float
    us: float
    waited_us: float
    launches: int
    op: str
    place: str
    part: str


@dataclass(frozen=True)
class Sample:
    """What one of the measured steps spent on a kernel of a kind, in microseconds."""

    name: str
    kind: str
    us: float


@dataclass(frozen=True)
class Row:
    """A line of a table: milliseconds a step (the median over steps, with its 95% interval), their share of
    the step by the clock, and their distance from the floor. `saving_ms` counts only work with a known floor;
    `covered` is the share of the time that has one."""

    name: str
    kind: str
    calls: int
    ms: float
    low: float
    high: float
    share: float
    bytes: float | None = None
    flops: float | None = None
    floor_ms: float | None = None
    share_of_floor: float | None = None
    saving_ms: float | None = None
    covered: float = 0.0
    ops: str = ""
    places: str = ""


@dataclass(frozen=True)
class GapRow:
    """Gaps that end at the same place of the model."""

    where: str
    part: str
    count: int
    ms: float
    waited_ms: float
    launches: int


@dataclass(frozen=True)
class Profile:
    """One step. `case` says what ran, under the records' names; `step_ms` is the time by the clock with no
    profiler at work; `entries` and `gaps` are those of the measured step of median length, `samples` the
    times of all measured steps. `files` are traces that Perfetto opens, by name."""

    case: Mapping[str, Scalar]
    device: str
    environment: Environment
    step_ms: Summary
    entries: tuple[Entry, ...]
    gaps: tuple[Gap, ...]
    samples: tuple[tuple[Sample, ...], ...]
    ceilings: Ceilings
    fusions: tuple[Fusion, ...] = ()
    graph_breaks: tuple[GraphBreak, ...] = ()
    recompilations: tuple[Recompilation, ...] = ()
    memory: PeakMemory | None = None
    notes: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def busy_ms(self) -> float:
        """The time in which the device was busy."""
        return summarize([sum(s.us for s in step) / 1e3 for step in self.samples]).median

    @property
    def waiting_ms(self) -> float:
        """The step by the clock, minus the busy time. The profiler slows the host down, and so lengthens the
        gaps in the trace, but it does not slow a GPU down."""
        if self.on_gpu:
            return max(0.0, self.step_ms.median - self.busy_ms)
        return sum(gap.us for gap in self.gaps) / 1e3

    @property
    def whole_ms(self) -> float:
        """The time that shares refer to: the step by the clock; on a CPU, where recording slows every op
        down, the recorded step."""
        return self.step_ms.median if self.on_gpu else self.busy_ms + self.waiting_ms

    def by_kind(self) -> list[Row]:
        """A row for each kind of work in the step, and one for the time without work."""
        rows = self._rows(lambda kind, name: kind, lambda kind, name: kind)
        waiting = self.waiting_ms
        if waiting > NO_TIME:
            row = Row(
                WAITING, WAITING, len(self.gaps), waiting, waiting, waiting, waiting / self.whole_ms,
                floor_ms=0.0, saving_ms=waiting, covered=1.0,
            )  # fmt: skip
            rows.append(row)
        return _most_to_save_first(rows)

    def by_kernel(self) -> list[Row]:
        """A row for each kernel and kind of work, on a CPU for each op."""
        rows = self._rows(lambda kind, name: f"{kind}\t{name}", lambda kind, name: name)
        return _most_to_save_first(row for row in rows if row.ms > NO_TIME or row.bytes or row.flops)

    def gaps_by_place(self) -> list[GapRow]:
        """The gaps by the op and the module whose launch ended them, the longest first."""
        groups: dict[tuple[str, str], list[Gap]] = defaultdict(list)
        for gap in self.gaps:
            where = ", ".join(filter(None, (pattern(gap.place), gap.op))) or "not known"
            groups[where, gap.part].append(gap)
        rows = [
            GapRow(
                where,
                part,
                len(group),
                sum(g.us for g in group) / 1e3,
                sum(g.waited_us for g in group) / 1e3,
                sum(g.launches for g in group),
            )
            for (where, part), group in groups.items()
        ]
        return sorted(rows, key=lambda row: -row.ms)

    def _rows(self, key: Callable[[str, str], str], label: Callable[[str, str], str]) -> list[Row]:
        groups: dict[str, list[Entry]] = defaultdict(list)
        for entry in self.entries:
            groups[key(entry.kind, entry.name)].append(entry)
        times: dict[str, list[float]] = {name: [0.0] * len(self.samples) for name in groups}
        for number, step in enumerate(self.samples):
            for sample in step:
                known = times.get(key(sample.kind, sample.name))
                if known is not None:
                    known[number] += sample.us / 1e3
        return [
            _row(label(group[0].kind, group[0].name), group, summarize(times[name]), self.whole_ms)
            for name, group in groups.items()
        ]

    def __str__(self) -> str:
        from fuseline.profiling.text import as_text

        return as_text(self)


def _row(name: str, group: Sequence[Entry], time: Summary, whole_ms: float) -> Row:
    floored = [(e.us, e.floor_us) for e in group if e.floor_us is not None]
    floor_us, floored_us = sum(floor for _, floor in floored), sum(us for us, _ in floored)
    total = sum(e.us for e in group)
    return Row(
        name,
        group[0].kind,
        len(group),
        time.median,
        time.low,
        time.high,
        time.median / whole_ms if whole_ms else 0.0,
        _known_sum(e.bytes for e in group),
        _known_sum(e.flops for e in group),
        floor_us / 1e3 if floored else None,
        floor_us / floored_us if floored_us else None,
        # Of the median step's time as much as could be saved in the step whose entries these are.
        _saved(floored) / total * time.median if floored and total else None,
        floored_us / total if total else 0.0,
        ", ".join(dict.fromkeys(e.op for e in group if e.op)),
        together(e.place for e in group),
    )


def _saved(floored: Iterable[tuple[float, float]]) -> float:
    return sum(max(0.0, us - floor) for us, floor in floored)


def _known_sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _most_to_save_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-(row.saving_ms or 0.0), -row.ms))
