"""Chooses the layouts of row kernels by row length, from times on this GPU.

    python benchmarks/tune_rows.py [--families softmax_forward] [--write]

For every kernel, element size and row length it times the layouts that hold such a row, and prints the
fastest with their shares of the copy bandwidth. A layout that is far behind after a few runs has no more; the
best are timed again, in turns. With --write the table (csrc/kernels/rows/table_h100.h) is written anew; the
next build takes it up. Families that are not measured keep their lines. Times are kept as JSON lines (--out),
from which --times chooses again, without a GPU. They are written as they come: a run that was stopped goes on
with --resume, and --times takes what it left, telling what is missing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, astuple, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import tyro
from norms import work

from fuseline import native
from fuseline.errors import InputError
from fuseline.native import NativeError
from fuseline.native.kernels import FAMILIES, NORMS, Kernels, open_kernels
from fuseline.native.layouts import (
    TABLE,
    Layout,
    Line,
    by_layout,
    candidates,
    choose,
    clustered,
    over_ranges,
    read,
    waiting,
    waits,
    write,
)
from fuseline.native.norm_layouts import every_layout, norm_layouts, taken
from fuseline.timing import copy_bandwidth_gbs, time_calls

LENGTHS = (
    *(8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1000, 1024, 1280, 1600, 1792, 2048, 2560, 3072, 3584),
    *(4096, 4608, 5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384, 20480, 24576, 32768, 49152, 65536),
    *(98304, 131072, 196608, 262144),
)
BETWEEN = (20000, 24001, 28673, 40001, 50257, 57345, 80001, 100003, 180001, 229377)
FOLLOWING = {n: n + 1 for n in (16384, 32768, 65536, 131072, 262144)}
BETWEEN_IN_VECTORS = (20000, 24000, 28672, 40000, 50304, 57344, 80000, 100000, 180000, 229376)
FOLLOWING_IN_VECTORS = {
    n: n + 8 for n in (1024, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536, 131072, 262144)
}
"""What fills a layout's copies at one length leaves one nearly empty at others: places between the lengths,
and what follows those that fill them. The latter pair is for kernels of rows that keep to 16 bytes."""
DTYPES = {2: torch.bfloat16, 4: torch.float32}
BYTES = 2**28
DEVICE = torch.device("cuda")
FIRST_RUNS, FAR_BEHIND = 3, 1.3
"""A layout has so many runs, and no more if it takes so much longer than the fastest before it."""
BEST = 3
"""So many are timed again, in turns."""

Call = Callable[[], object]
Point = tuple[str, int, int]
"""Family, bytes of an element, row length."""


@dataclass(frozen=True)
class Options:
    """What to measure, and whether to write the table."""

    families: tuple[str, ...] = FAMILIES
    lengths: tuple[int, ...] = ()
    """Row lengths; none for those of each family. What is said of shorter and longer ones stays."""
    repeats: int = 10
    write: bool = False
    out: Path | None = None
    """Times as JSON lines."""
    resume: bool = False
    """Go on with the times in --out."""
    times: Path | None = None
    """Choose from these rather than measure."""


@dataclass(frozen=True)
class Family:
    """How to run a kernel, how often it moves its rows, and what to try by length and element size.

    Softmax's tiles of rows at odd addresses (tiled.cuh) lay themselves out; the table serves the others.
    """

    bind: Callable[[Kernels, torch.Tensor], Call]
    moves: int
    tried: Callable[[int, int], Iterable[Layout]]
    _: KW_ONLY
    places: tuple[int, ...] = LENGTHS
    between: tuple[int, ...] = BETWEEN
    following: Mapping[int, int] = field(default_factory=FOLLOWING.copy)
    every: tuple[Layout, ...] = ()
    """What a line may say, where layouts differ by length; else what was measured."""
    taken: Callable[[int, int, Layout], Any] = lambda n, size, layout: layout
    """The same for layouts that are one at a length."""

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({*self.places, *self.between, *self.following.values()}))


def softmax_forward(kernels: Kernels, x: torch.Tensor) -> Call:
    y = torch.empty_like(x)
    return lambda: kernels.softmax_forward(x, y)


def softmax_backward(kernels: Kernels, x: torch.Tensor) -> Call:
    y, grad_x = torch.softmax(x, -1), torch.empty_like(x)
    return lambda: kernels.softmax_backward(x, y, grad_x)


def cross_entropy(kernels: Kernels, x: torch.Tensor) -> Call:
    """The loss and its gradient."""
    rows, classes = x.shape
    target = torch.randint(classes, (rows,), device=DEVICE)
    loss, grad = torch.empty(rows, device=DEVICE), torch.empty_like(x)
    statistics = torch.empty(rows, 2, device=DEVICE)
    return lambda: kernels.cross_entropy_forward(x, target, loss, statistics, grad)


def layer_norm_forward(kernels: Kernels, x: torch.Tensor) -> Call:
    weight, bias = torch.randn(2, x.shape[1], device=DEVICE, dtype=x.dtype)
    y, (mean, rstd) = torch.empty_like(x), torch.empty(2, x.shape[0], device=DEVICE)
    return lambda: kernels.layer_norm_forward(x, weight, bias, y, mean, rstd)


def layer_norm_backward(kernels: Kernels, x: torch.Tensor) -> Call:
    """All three gradients, by one call for each layout: the scratch is that of the layout in force."""
    weight = torch.randn(x.shape[1], device=DEVICE, dtype=x.dtype)
    mean, rstd = x.float().mean(1), x.float().std(1).reciprocal()
    grads = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    return lambda: kernels.layer_norm_backward(x, x, weight, mean, rstd, *grads)


def softmax_layouts(held: dict[int, tuple[int, ...]], tensors: int) -> Callable[[int, int], Iterator[Layout]]:
    """`held`: vectors of a thread by element size; `tensors`: that a row waits with."""

    def tried(n: int, size: int) -> Iterator[Layout]:
        yield from candidates(n, size, held[size], ())
        yield from waits(n, size, tensors)
        if size == 2 and tensors == 1 and 1024 < n <= 16384:
            yield Layout(4, 512, kernel="packed")

    return tried


def norm_forward_layouts(n: int, size: int) -> list[Layout]:
    held = candidates(n, size, (1, 2, 4), ())
    return [*(layout for layout in held if layout.cluster == 1), *waiting(n, size)]


def of_many(norm: str, direction: str) -> Family:
    short = {"forward": "fw", "backward": "bw"}[direction]
    moves = (4 if "add" in norm else 2) if short == "fw" else 3 + ("add" in norm) + ("dropout" in norm)
    return Family(
        bind=lambda kernels, x: work(norm, short, x)[1],
        moves=moves,
        tried=lambda n, size: norm_layouts(norm, direction, n, size),
        between=BETWEEN_IN_VECTORS,
        following=FOLLOWING_IN_VECTORS,
        every=tuple(every_layout(direction)),
        taken=lambda n, size, layout: taken(norm, direction, n, size, layout),
    )


MEASURED = {
    "softmax_forward": Family(softmax_forward, 2, softmax_layouts({2: (1, 2, 4), 4: (1, 2, 4, 8)}, 1)),
    "softmax_backward": Family(softmax_backward, 3, softmax_layouts({2: (1, 2, 4), 4: (1, 2, 4)}, 2)),
    "cross_entropy": Family(cross_entropy, 2, softmax_layouts({2: (1, 4), 4: (1, 8)}, 1)),
    "layer_norm_forward": Family(
        layer_norm_forward,
        2,
        norm_forward_layouts,
        between=BETWEEN_IN_VECTORS,
        following=FOLLOWING_IN_VECTORS,
    ),
    "layer_norm_backward": Family(
        layer_norm_backward,
        3,
        lambda n, size: clustered(n, size, (1, 2) if size == 2 else (1, 2, 4)),
        between=BETWEEN_IN_VECTORS,
        following=FOLLOWING_IN_VECTORS,
    ),
    **{f"many_{norm}_{way}": of_many(norm, way) for norm in NORMS for way in ("forward", "backward")},
}


def measure(kernels: Kernels, name: str, size: int, n: int, repeats: int) -> dict[Layout, float]:
    """Median microseconds of every layout that runs rows of n."""
    x = torch.randn(BYTES // size // n, n, device=DEVICE, dtype=DTYPES[size])
    call = MEASURED[name].bind(kernels, x)
    times: dict[Layout, float] = {}

    def median(layout: Layout, runs: int) -> float:
        kernels.override_plan(name, layout)
        try:
            return time_calls(call, DEVICE, repeats=runs, warmup=1).median
        finally:
            kernels.override_plan(name, None)

    for layout in MEASURED[name].tried(n, size):
        try:
            times[layout] = median(layout, FIRST_RUNS)
            if times[layout] <= FAR_BEHIND * min(times.values()):
                times[layout] = median(layout, repeats)
        except (NativeError, RuntimeError):  # the device has no room for it, or there is no such kernel
            times.pop(layout, None)
    for _ in range(2):
        for layout in sorted(times, key=lambda one: times[one])[:BEST]:
            times[layout] = (times[layout] + median(layout, repeats)) / 2
    return times


def measure_all(options: Options, done: Collection[Point]) -> Iterator[dict[str, Any]]:
    """A record of each family, element size and length but those `done`, as --out keeps them."""
    native.load()
    kernels = open_kernels()
    copy = copy_bandwidth_gbs(DEVICE)
    device = torch.cuda.get_device_name(DEVICE)
    print(f"{device}, copy {copy:.0f} GB/s")
    for name, size, n in points(options):
        if (name, size, n) in done:
            continue
        times = measure(kernels, name, size, n, options.repeats)
        ranked = sorted(times.items(), key=lambda item: item[1])
        shares = MEASURED[name].moves * BYTES / 1e3 / copy
        found = "   ".join(f"{shares / us:.3f} {layout}" for layout, us in ranked[:BEST])
        print(f"{name:<40}{size:>2}{n:>8}  {found}", flush=True)
        rows = [[us, *astuple(layout)] for layout, us in ranked]
        yield {"family": name, "size": size, "n": n, "device": device, "times": rows}


def lengths_of(options: Options, name: str) -> tuple[int, ...]:
    return options.lengths or MEASURED[name].lengths


def points(options: Options) -> list[Point]:
    return [
        (name, size, n) for name in options.families for size in DTYPES for n in lengths_of(options, name)
    ]


def point(record: dict[str, Any]) -> Point:
    return record["family"], record["size"], record["n"]


def kept(path: Path) -> list[dict[str, Any]]:
    """The records of a file. The end of a line that was being written when its run was killed is cut off."""
    whole = path.read_bytes().rpartition(b"\n")[0].splitlines(keepends=True)
    return [json.loads(line) for line in whole]


def begun(options: Options) -> list[dict[str, Any]]:
    """What --out holds already, whole lines alone. Raises `InputError` if it must not be gone on with."""
    if options.out is None:
        if options.resume:
            raise InputError("--resume goes on with the times in --out: name it.")
        return []
    if not options.out.exists():
        options.out.parent.mkdir(parents=True, exist_ok=True)
        return []
    if not options.resume:
        raise InputError(f"{options.out} holds times already: go on with --resume, or give another --out.")
    records = kept(options.out)
    device = torch.cuda.get_device_name(DEVICE)
    others = {str(record.get("device", "a device it does not name")) for record in records} - {device}
    if others:
        raise InputError(
            f"{options.out} has times on {', '.join(sorted(others))}; this is {device}. Give another --out."
        )
    with options.out.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    return records


def measured(options: Options) -> list[dict[str, Any]]:
    """All records, each in --out as soon as it is there."""
    records = begun(options)
    if records:
        print(f"going on with {len(records)} records of {options.out}")
    for record in measure_all(options, {point(one) for one in records}):
        records.append(record)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    return records


def lines_of(name: str, size: int, records: list[dict[str, Any]]) -> list[Line]:
    """The table's, from times of some lengths; none from none."""
    family, times = MEASURED[name], {}
    for record in records:
        if (record["family"], record["size"]) == (name, size) and record["times"]:
            n = record["n"]
            found: dict[Layout, float] = {}
            for us, *told in record["times"]:
                layout = family.taken(n, size, Layout(*told))
                if layout is not None:  # of times from elsewhere, what no kernel takes any more
                    found[layout] = min(us, found.get(layout, us))
            times[n] = found
    every = family.every or sorted({layout for found in times.values() for layout in found})
    said = by_layout(times, every, lambda n, layout: family.taken(n, size, layout))
    return choose(over_ranges(said, family.following, family.between))


def missing(options: Options, records: list[dict[str, Any]]) -> dict[tuple[str, int], list[int]]:
    """The lengths without times, by family and element size."""
    there = {point(record) for record in records}
    lacks: dict[tuple[str, int], list[int]] = {}
    for name, size, n in points(options):
        if (name, size, n) not in there:
            lacks.setdefault((name, size), []).append(n)
    return lacks


def shorter(name: str, lines: list[Line], shortest: int) -> list[Line]:
    """What a family's lines say of rows shorter than any that were measured now."""
    if shortest <= MEASURED[name].lengths[0]:
        return []
    kept = [line for line in lines if line[0] < shortest - 1]
    return [*kept, *((shortest - 1, layout) for _, layout in lines[len(kept) : len(kept) + 1])]


def merged(lines: list[Line]) -> list[Line]:
    """Of neighbours that say the same the longest."""
    return [one for one, after in zip_longest(lines, lines[1:]) if after is None or after[1] != one[1]]


def measured_on(text: str) -> str:
    """The device that a table's text names."""
    found = re.search(r"times on an (.*); edit", text)
    return found[1] if found else "unknown device"


def main(options: Options) -> int:
    try:
        if options.times is not None:
            records = kept(options.times)
        elif torch.cuda.is_available():
            records = measured(options)
        else:
            raise InputError("This times CUDA kernels, and torch sees no CUDA device.")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        left = (
            "nothing is kept without --out" if options.out is None else f"--resume goes on with {options.out}"
        )
        print(f"Stopped; {left}.", file=sys.stderr)
        return 130
    table = read(TABLE.read_text())
    lacks = missing(options, records)
    for name in options.families:
        for size in DTYPES:
            lengths = lacks.get((name, size), [])
            if lengths:
                all_missing = len(lengths) == len(lengths_of(options, name))
                which = "any length" if all_missing else ", ".join(map(str, lengths))
                print(f"{name} of {size} bytes keeps its lines: there are no times of {which}")
            elif lines := lines_of(name, size, records):
                shortest = min(n for of, width, n in map(point, records) if (of, width) == (name, size))
                before = table[name, size]
                longer = [line for line in before if line[0] > lines[-1][0]]
                table[name, size] = [*shorter(name, before, shortest), *lines, *longer]
    if options.write:
        devices = {record["device"] for record in records if "device" in record}
        device = ", ".join(sorted(devices)) or measured_on(TABLE.read_text())
        table = {family: merged(lines) for family, lines in table.items()}
        TABLE.write_text(write(table, FAMILIES, device))
        print(f"wrote {TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
