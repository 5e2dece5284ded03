"""A timeline in lines that are read like text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fuseline.report.charts import Stretch, Timeline
from fuseline.report.layout.legends import legend
from fuseline.report.layout.lettering import text_width
from fuseline.report.numbers import tick
from fuseline.report.scene import Mark, Path, Rect, Scene, Text

LINES = {True: 4, False: 7}
STRIP = 30.0
PART = 15.0  # the name of the part, over the strip
GAP = 15.0
CELL = 1.5  # pixels: what is narrower is shown by the most of its cell


def draw(chart: Timeline, width: float) -> Scene:
    """Four lines where it is wide, seven on a phone; each begins with its time."""
    lines = LINES[width >= 560]
    each = chart.end / lines
    marks, y = legend(chart.legend, width)
    drawn: list[Mark] = [*marks]
    left = max(text_width(tick_of(each * n), 11) for n in range(lines)) + 10
    scale = (width - left) / each
    for number in range(lines):
        begin, end = number * each, (number + 1) * each
        y += PART
        drawn.append(Rect(left, y, width - left, STRIP, "grid", opacity=0.55))
        drawn.append(Text(left - 8, y + STRIP / 2 + 4, tick_of(begin), 11, "muted", "end"))
        for run in runs(chart.stretches, begin, end, CELL / scale):
            x = left + (run.begin - begin) * scale
            drawn.append(Rect(x, y, max(CELL, (run.end - run.begin) * scale), STRIP, run.role, tip=run.tip))
        drawn.extend(_parts(chart.parts, begin, end, left, y, scale))
        y += STRIP + GAP
    drawn.append(Text(left, y, f"{chart.unit} from the step's begin, line by line", 11, "muted"))
    return Scene(width, y + 8, tuple(drawn))


def tick_of(value: float) -> str:
    return tick(float(f"{value:.3g}"))


def runs(stretches: Sequence[Stretch], begin: float, end: float, cell: float) -> list[Stretch]:
    """The stretches between `begin` and `end`, drawn in cells: each cell has the colour of what fills most of
    it, or none where most of it is empty; cells of one colour beside each other are one run, with the tip of
    its longest stretch."""
    count = max(1, round((end - begin) / cell))
    filled: list[dict[str, float]] = [defaultdict(float) for _ in range(count)]
    longest: list[dict[str, Stretch]] = [{} for _ in range(count)]
    for stretch in stretches:
        if stretch.end <= begin or stretch.begin >= end:
            continue
        first = max(0, int((stretch.begin - begin) / cell))
        last = min(count - 1, int((stretch.end - begin) / cell))
        for number in range(first, last + 1):
            left, right = begin + number * cell, begin + (number + 1) * cell
            covered = min(stretch.end, right) - max(stretch.begin, left)
            if covered > 0:
                filled[number][stretch.role] += covered
                known = longest[number].get(stretch.role)
                if known is None or stretch.end - stretch.begin > known.end - known.begin:
                    longest[number][stretch.role] = stretch
    found: list[Stretch] = []
    widest = 0.0
    for number, parts in enumerate(filled):
        if sum(parts.values()) < cell / 2:
            continue
        role = max(parts, key=lambda r: parts[r])
        held = longest[number][role]
        left, right = begin + number * cell, min(end, begin + (number + 1) * cell)
        if found and found[-1].role == role and abs(found[-1].end - left) < cell / 4:
            longer = held.end - held.begin > widest
            tip = held.tip if longer else found[-1].tip
            widest = max(widest, held.end - held.begin)
            found[-1] = Stretch(found[-1].begin, right, role, tip)
        else:
            widest = held.end - held.begin
            found.append(Stretch(left, right, role, held.tip))
    return found


def _parts(
    parts: Sequence[Stretch], begin: float, end: float, left: float, y: float, scale: float
) -> list[Mark]:
    """A line over the strip for each part, with its name where there is room."""
    marks: list[Mark] = []
    for part in parts:
        first, last = max(part.begin, begin), min(part.end, end)
        if last <= first:
            continue
        x, wide = left + (first - begin) * scale, (last - first) * scale
        marks.append(Path(((x, y - 2), (x + wide, y - 2)), stroke=part.role, width=1.5))
        if text_width(part.tip, 10.5) < wide:
            marks.append(Text(x, y - 5, part.tip, 10.5, "muted"))
    return marks
