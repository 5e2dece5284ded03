"""Fuseline's ops against their peers (PyTorch eager, torch.compile, Liger, QuACK): error against float64,
time, bandwidth and the share of this machine's copy bandwidth, forward and backward."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuseline.cli.names import split_names
from fuseline.cli.options import Common, resolve_device

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.bench.ops import OpsBench
    from fuseline.bench.ops.suite import Observer
    from fuseline.records import Record

DEFAULT_OUT = Path("fuseline-ops")
GPU_LENGTHS = (128, 768, 1024, 4096, 16384, 65536)
CPU_LENGTHS = (128, 1024)
# 256 MiB a matrix on a GPU: several times its L2. On a processor small enough to be done in a minute.
GPU_ELEMENTS = {"bfloat16": 2**27, "float16": 2**27, "float32": 2**26}
CPU_ELEMENTS = {"bfloat16": 2**20, "float16": 2**20, "float32": 2**20}

TABLE_WIDTH = 120


@dataclass(frozen=True)
class Options(Common):
    ops: tuple[str, ...] = ()
    """Ops to measure: softmax, layer_norm. All if none is named."""
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """bfloat16, float16, float32."""
    lengths: tuple[int, ...] = ()
    """Row lengths. A matrix has as many rows as make 256 MiB on a GPU, 2^20 elements on a processor."""
    peers: tuple[str, ...] = ()
    """Who to measure: fuseline, eager, inductor, liger, quack. All if none is named; absent ones are said."""
    elements: int | None = None
    """Elements of a matrix, in place of the default: small ones are also timed inside a CUDA graph."""
    quick: bool = False
    """One dtype, one length, few repeats: to see that it runs."""


def run(options: Options) -> int:
    from fuseline import report
    from fuseline.bench import ops as suite
    from fuseline.records import read

    bench = _bench(options)
    out = options.out or DEFAULT_OUT
    if options.dry_run:
        _print_plan(bench, out, as_json=options.json)
        return 0
    with _progress() as observe:
        records = suite.run(bench, out, observe)
    page = report.build(read(out / "ops.jsonl"), out)
    if options.json:
        print(json.dumps({"records": [asdict(record) for record in records], "page": str(page)}))
        return 0
    from rich.console import Console

    # A pipe has no width of its own, and rich would squeeze the table into 80 columns.
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(_table(records))
    for record in records:
        if record.metric == "skipped":
            print(f"{record.peer} skipped, {_place(record)}: {record.case['reason']}")
    print(f"Records: {out / 'ops.jsonl'}\nPage:    {page}")
    return 0


def _bench(options: Options) -> OpsBench:
    import torch

    from fuseline.bench.ops import Effort, OpsBench
    from fuseline.bench.peers import PEERS

    device = torch.device(resolve_device(options.device))
    on_gpu = device.type == "cuda"
    lengths = options.lengths or ((1024,) if options.quick else GPU_LENGTHS if on_gpu else CPU_LENGTHS)
    elements = GPU_ELEMENTS if on_gpu else CPU_ELEMENTS
    if options.elements is not None:
        elements = dict.fromkeys(elements, options.elements)
    return OpsBench(
        device=device,
        lengths=lengths,
        elements=elements,
        effort=Effort(rounds=2, repeats=5) if options.quick else Effort(rounds=6, repeats=10),
        ops=split_names(options.ops),
        dtypes=split_names(options.dtypes)[: 1 if options.quick else None],
        peers=split_names(options.peers) or tuple(PEERS),
        seed=options.seed,
    )


def _print_plan(bench: OpsBench, out: Path, *, as_json: bool) -> None:
    cases = [(op.name, str(dtype).removeprefix("torch."), *case.shape) for op, dtype, case in bench.cases()]
    absent = {peer.name: peer.why_not(bench.device) for peer in bench.contenders}
    if as_json:
        keys = ("op", "dtype", "rows", "n")
        print(json.dumps({"cases": [dict(zip(keys, case, strict=True)) for case in cases], "peers": absent}))
        return
    print(f"{len(cases)} cases on {bench.device}, forward and backward:")
    for op, dtype, rows, n in cases:
        print(f"  {op:<12} {dtype:<10} {rows} x {n}")
    for peer, reason in absent.items():
        print(f"peer {peer:<12} {f'skipped: {reason}' if reason else 'here'}")
    print(f"Records would go to {out / 'ops.jsonl'}.")


@contextmanager
def _progress() -> Iterator[Observer]:
    """A bar on stderr that says what is being measured."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)

        def observe(now: str, done: int, total: int) -> None:
            progress.update(task, description=now, completed=done, total=total)

        yield observe


def _table(records: Sequence[Record]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="Ops against their peers", box=box.SIMPLE)
    for heading in ("op", "dtype", "n", "direction", "peer"):
        table.add_column(heading)
    for heading in ("us", "GB/s", "of copy", "its time / ours", "error"):
        table.add_column(heading, justify="right")
    places: dict[tuple[str, ...], dict[str, dict[str, Record]]] = {}
    for record in records:
        if "direction" in record.case and record.metric != "host_us":
            captured = " captured" if record.case["captured"] else ""
            op, dtype, n, direction = (str(record.case[key]) for key in ("op", "dtype", "n", "direction"))
            peers = places.setdefault((op, dtype, n, direction + captured), {})
            peers.setdefault(record.peer, {})[record.metric] = record
    for place, peers in places.items():
        table.add_section()
        for number, (peer, row) in enumerate(peers.items()):
            table.add_row(*(place if number == 0 else ("", "", "", "")), peer, *_cells(row))
    return table


def _cells(row: dict[str, Record]) -> list[str]:
    forms = {
        "time_us": "{:.1f}",
        "bandwidth_gbs": "{:.0f}",
        "share_of_copy": "{:.3f}",
        "paired_speedup": "{:.3f}",
        "error": "{:.1e}",
    }
    return ["" if metric not in row else form.format(row[metric].value) for metric, form in forms.items()]


def _place(record: Record) -> str:
    keys = ("op", "dtype", "rows", "n")
    return " ".join(str(record.case[key]) for key in keys if key in record.case)
