"""The table of kernel layouts (csrc/kernels/rows/table_h100.h): read, chosen anew from times, written.

A layout says how the threads of a row kernel share a row. Which is fastest depends on the row's length and
the bytes of an element; `benchmarks/tune_rows.py` measures, and this file decides and writes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from fuseline.errors import InputError

_ROWS = Path(__file__).parent.parent / "csrc" / "kernels" / "rows"
TABLE = _ROWS / "table_h100.h"
OWN_WIDTHS = _ROWS / "table_h200.h"
"""Widths for which a GPU with memory like an H200's has lines of its own."""
VECTOR_BYTES = 16
WARP = 32
WORTH = 0.005
"""A layout is taken over from the length before unless another is faster by more than this share."""

RING_HELD = (2, 4)
RING_STAGES = (4, 6)
"""What a thread holds of a row in a ring of the norms' backward, and the rows of a ring at most."""

PART_VECTORS = (64, 1024)
"""Of a warp's part of a row that waits in shared memory: fewer are idle, more are none's."""
MOST_SHARED = 225 << 10
"""Bytes of a block."""
WAITING_WARPS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
LINE_BYTES = 128
"""Of memory: where a row's copies begin, which at other addresses has some vectors more."""

WAITING_HELD = range(2, 33)
WAITING_BYTES = (8 << 10, 200 << 10)
"""What a thread has of a row that waits in shared memory, and the bytes of a block's part of it."""

ROW_KERNELS = ("rules", "held", "packed", "copied", "light", "ring", "tiles")
"""The kernels for rows, by number; RowKernel in csrc/kernels/rows/choice.h says what each does."""

_LIST = re.compile(r"RowChoice k(\w+)([24])\[\] = \{\n(.*?)\};", re.DOTALL)
_LINE = re.compile(r"\{(\d+), (\w+)\{([\d, ]+)\}\}")


@dataclass(frozen=True, order=True)
class Layout:
    """Vectors of 16 bytes that a thread holds, threads of a block at most, blocks a row, and rows ahead."""

    held: int
    block: int
    cluster: int = 1
    stages: int = 0
    kernel: str = ROW_KERNELS[0]

    def threads(self, n: int, element_size: int) -> int:
        """Threads of one block that share a row of n elements."""
        vectors = -(-n * element_size // VECTOR_BYTES)
        return -(-vectors // (self.held * self.cluster))

    def fits(self, n: int, element_size: int) -> bool:
        """Whether a row of n fits, and keeps the blocks it is given busy."""
        threads = self.threads(n, element_size)
        if self.cluster == 1 and self.stages == 0 and self.block < 512:
            return threads <= WARP
        return (self.cluster == 1 or threads >= 2 * WARP) and threads <= self.block


RULES = Layout(1, WARP)
"""For the kernels that have rules of their own."""

_FIELDS = {
    **dict.fromkeys(("rules", "held", "ring"), ("held", "block", "cluster", "stages")),
    **dict.fromkeys(("packed", "tiles"), ("held", "block")),
    "copied": ("block", "cluster", "stages"),
    "light": ("block", "cluster"),
}
"""What a line says of a layout, in the order of the structs in csrc/kernels/rows/choice.h."""
_WAITS = {"held": 0, "cluster": 1, "stages": 1}
_UNSAID: dict[str, dict[str, int]] = {
    **{kernel: {"cluster": 1, "stages": 0} for kernel in ROW_KERNELS},
    "copied": _WAITS,
    "light": _WAITS,
    "ring": {},
}
"""What a layout has where its line says nothing of it."""

Line = tuple[int, Layout]
"""The longest row that a layout is for, and the layout."""

Table = dict[tuple[str, int], list[Line]]
"""Lines by kernel (as in `fuseline.native.kernels.FAMILIES`) and bytes an element, shortest rows first."""


def read(text: str) -> Table:
    """The table in a header's text."""
    table: Table = {}
    for name, size, body in _LIST.findall(text):
        table[_snake_case(name), int(size)] = [_line(*found) for found in _LINE.findall(body)]
    if not table:
        raise InputError("No table of layouts in this text: is it csrc/kernels/rows/table_h100.h?")
    return table


def waits(n: int, element_size: int, tensors: int = 1) -> Iterator[Layout]:
    """Layouts of blocks that end with their row, which comes to their shared memory in bulk copies."""
    whole = n * element_size % LINE_BYTES == 0
    vectors = -(-(n * element_size + (0 if whole else LINE_BYTES - element_size)) // VECTOR_BYTES)
    for warps, cluster in product(range(2, 17), (1, 2, 4, 8, 16)):
        part = -(-vectors // (cluster * warps * 8)) * 8
        room = part * warps * tensors * VECTOR_BYTES
        if PART_VECTORS[0] <= part <= PART_VECTORS[1] and room <= MOST_SHARED:
            yield Layout(0, warps * WARP, cluster, 1, "copied")


def shares_evenly(vectors: int, warps: int, cluster: int) -> bool:
    """Whether so many warps are worth trying for a row: those that are no power of two leave no lane idle."""
    return not warps & (warps - 1) or vectors % (cluster * warps * WARP) == 0


def _line(longest: str, struct: str, numbers: str) -> Line:
    kernel = struct.lower()
    said = dict(zip(_FIELDS[kernel], map(int, numbers.split(", ")), strict=False))
    return int(longest), Layout(**{**_UNSAID[kernel], **said}, kernel=kernel)


def by_layout(
    times: Mapping[int, Mapping[Any, float]], layouts: Iterable[Layout], taken: Callable[[int, Layout], Any]
) -> dict[int, dict[Layout, float]]:
    """Times of all that a line may say, from those by what `taken` says of a layout at a length: the same for
    layouts that are one there."""
    every = list(layouts)
    return {
        n: {layout: found[one] for layout in every if (one := taken(n, layout)) in found}
        for n, found in times.items()
    }


def choose(times: Mapping[int, Mapping[Layout, float]]) -> list[Line]:
    """As few lines as stay within `WORTH` of the fastest of each length.

    `times` are microseconds by row length and layout. Of several that a line could have it takes the one that
    is fastest in all, and rules only where they are alone.
    """
    lines: list[Line] = []
    behind: dict[Layout, float] = {}
    for n in sorted(times):
        found = times[n]
        if not found:
            raise InputError(f"No layout runs rows of {n}: add one to what is tried.")
        best = min(found.values())
        fine = {layout: time / best for layout, time in found.items() if time <= best * (1 + WORTH)}
        if len(fine) > 1:
            fine.pop(RULES, None)
        both = {layout: behind[layout] + fine[layout] for layout in behind.keys() & fine.keys()}
        if both:
            lines.pop()
        behind = both or fine
        lines.append((n, min(behind, key=lambda layout: (behind[layout], layout))))
    return lines


def over_ranges(
    times: Mapping[int, Mapping[Layout, float]], following: Mapping[int, int], between: Collection[int] = ()
) -> dict[int, Mapping[Layout, float]]:
    """Times for `choose` where a line is to serve all lengths up to its own, and not that one alone.

    `following` has for some lengths the next one that the kernel takes, measured too (65,537 for 65,536).
    From the first of those on a length stands for all behind the one before, and its layouts are judged by
    the worse of that range's two ends, as multiples of the fastest there. The length itself has a line of its
    own, before which the range ends, unless it is one of those `between` the lengths that people ask for.
    """
    following = {n: after for n, after in following.items() if n in times and after in times}
    lengths = sorted(times.keys() - following.values())
    first = min(following, default=math.inf)
    found: dict[int, Mapping[Layout, float]] = {}
    for before, n in pairwise((0, *lengths)):
        if n <= first:
            found[n] = times[n]
            continue
        low, high = (_multiples(times[following.get(end, end)]) for end in (before, n))
        worse = {layout: max(low[layout], high[layout]) for layout in low.keys() & high.keys()}
        if n in between:
            found[n] = worse
        else:
            found[n - 1], found[n] = worse, times[n]
    return found


def _multiples(times: Mapping[Layout, float]) -> dict[Layout, float]:
    best = min(times.values(), default=1.0)
    return {layout: time / best for layout, time in times.items()}


def candidates(
    n: int,
    element_size: int,
    held: Sequence[int],
    staying: Sequence[int],
    stages: Sequence[int] = (1, 2, 3, 4),
) -> Iterator[Layout]:
    """Layouts worth trying for rows of n.

    `held` are the vectors a thread may hold in a kernel whose blocks end with their row (the largest of
    them where a row takes more than a warp), `staying` those where blocks stay.
    """
    blocks = (64, 128, 256)
    short = [Layout(one, block) for one in held for block in blocks]
    long = [Layout(max(held), 512, cluster) for cluster in (1, 2, 4, 8)]
    stay = [
        Layout(one, 512, cluster, ahead) for one in staying for cluster in (1, 2, 4, 8) for ahead in stages
    ]
    for layout in (*short, *long, *stay):
        if layout.fits(n, element_size):
            yield layout


def waiting(n: int, element_size: int) -> Iterator[Layout]:
    """Layouts worth trying for rows of n that wait in shared memory, as those of the norms' forward do."""
    vectors = n * element_size // VECTOR_BYTES
    for block in (64, 128, 256, 512):
        for cluster in (1, 2, 4, 8, 16):
            held = -(-vectors // (block * cluster))
            if held in WAITING_HELD and WAITING_BYTES[0] <= held * block * VECTOR_BYTES <= WAITING_BYTES[1]:
                yield Layout(held, block, cluster, 1)


def clustered(n: int, element_size: int, held: Sequence[int]) -> Iterator[Layout]:
    """Layouts worth trying for rows of n in a kernel whose blocks stay, and share rows in clusters.

    Those with rows ahead hold these in rings in shared memory.
    """
    for one in held:
        for block in (256, 512):
            for cluster in (1, 2, 4, 8, 16):
                layout = Layout(one, block, cluster)
                threads = layout.threads(n, element_size)
                if (
                    threads <= block
                    and (cluster == 1 or threads >= 4 * WARP)
                    and (block == 256 or threads > 256)
                ):
                    yield layout
    for one in RING_HELD:
        for block in (256, 384, 512, 640):
            for cluster in (1, 2, 4, 8, 16):
                for stages in RING_STAGES:
                    layout = Layout(one, block, cluster, stages)
                    threads = layout.threads(n, element_size)
                    if WARP // 2 < threads <= block and (cluster == 1 or threads >= 4 * WARP):
                        yield layout


def write(table: Table, families: Sequence[str], device: str) -> str:
    """The header's text. `families` gives the order; each has lists by bytes of an element, or none."""
    lists = [
        f"inline constexpr RowChoice k{_camel_case(family)}{size}[] = {{\n"
        + "".join(f"    {{{longest}, {_struct(layout)}}},\n" for longest, layout in table[family, size])
        + "};\n"
        for family in families
        for size in (2, 4)
        if (family, size) in table
    ]

    def entry(family: str, size: int) -> str:
        return f"row_choices(k{_camel_case(family)}{size})" if (family, size) in table else "{}"

    index = "".join(f"    {{{entry(family, 2)}, {entry(family, 4)}}},\n" for family in families)
    return _TEMPLATE.format(device=device, lists="".join(lists), index=index)


_TEMPLATE = """\
// Generated by benchmarks/tune_rows.py from times on an {device}; edit there what is tried.
//
// Included by choice.h, which says what each kernel's numbers are. A line is for rows of up to its number.
#pragma once

namespace fuseline {{

{lists}
template <int kCount>
constexpr RowChoices row_choices(const RowChoice (&choices)[kCount]) {{
  return {{choices, kCount}};
}}

inline constexpr RowChoices kRowChoices[FUSELINE_FAMILIES][2] = {{
{index}}};

}}  // namespace fuseline
"""


def _struct(layout: Layout) -> str:
    """The layout as C++ writes it, without the last numbers where nothing need be said of them."""
    fields, unsaid = _FIELDS[layout.kernel], _UNSAID[layout.kernel]
    while unsaid.get(fields[-1]) == getattr(layout, fields[-1]):
        fields = fields[:-1]
    return f"{layout.kernel.capitalize()}{{{', '.join(str(getattr(layout, field)) for field in fields)}}}"


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


def _camel_case(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
