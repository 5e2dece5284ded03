"""Linear layers for few rows of activations, int8, int4 and bf16, against cuBLAS, inductor and tinygemm: the
GEMV chart of the crash course (weights per second over K = N), and the layers of Llama over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuseline.cli import drawn
from fuseline.cli.measuring import measuring
from fuseline.cli.names import split_names
from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.cli.publishing import publish

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.records import Record

DEFAULT_OUT = Path("fuseline-linear")


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    parts: tuple[str, ...] = ()
    """Parts to measure: chart, layers; drawn, layers of sizes drawn from --seed, at which no kernel was
    tuned; cpu, on a CPU: layers against float32's. If none is named, the first three on a GPU, and cpu on a
    CPU."""
    peers: tuple[str, ...] = ()
    """Of fuseline, eager, inductor, max-autotune, tinygemm, torchao. All if none is named."""
    formats: tuple[str, ...] = ()
    """Of int8, int4, bf16, fp8. All but fp8 if none is named."""
    rows: tuple[int, ...] = ()
    """Rows of activations for the layers (cpu: 1 and 4 if none are named)."""
    sizes: tuple[int, ...] = ()
    """K = N of the chart."""
    repeats: int = 10
    """Turns that each peer takes, three replays of its graph long; four times as many in the part cpu."""
    seconds: float = 0.0
    """Stop after so long; 0 for no limit. --resume goes on from there."""
    resume: bool = False
    """Leave out what --out holds already from this GPU, torch and commit."""
    jobs: int | None = None
    """Processes that compile for the peers beforehand; 0 for none, by default one a core on a GPU machine."""
    own_clock: bool = False
    """Let inductor tune by its own clock, 0.1 s for each configuration, and not by a brief one. Its peers are
    recorded under names of their own, so that both stand and the better counts."""


def run(options: Options) -> int:
    import torch

    from fuseline.bench import linear as suite
    from fuseline.bench.compiling import default_jobs
    from fuseline.bench.linear.contenders import PEERS
    from fuseline.bench.linear.problems import CHART_SIZES, CPU_LAYERS, CPU_ROWS, FORMATS, ROWS

    device = torch.device(resolve_device(options.device))
    parts = split_names(options.parts) or ((suite.ON_CPU,) if device.type == "cpu" else suite.PARTS)
    bench = suite.LinearBench(
        device,
        parts,
        split_names(options.peers) or PEERS,
        split_names(options.formats) or FORMATS,
        options.rows or (CPU_ROWS if parts == (suite.ON_CPU,) else ROWS),
        options.sizes or CHART_SIZES,
        options.repeats,
        options.seconds,
        jobs=default_jobs(device) if options.jobs is None else options.jobs,
        resume=options.resume,
        seed=options.seed,
        own_clock=options.own_clock,
    )
    out = options.out or DEFAULT_OUT
    if options.dry_run:
        products = len(bench.problems()) + (len(CPU_LAYERS) * len(bench.rows) if suite.ON_CPU in parts else 0)
        peers = ("fuseline", "eager") if parts == (suite.ON_CPU,) else bench.peers
        what = f"{products} products by {', '.join(peers)}"
        print(f"{what} on {bench.device}. Records would go to {out / 'linear.jsonl'}.")
        return 0
    torch.manual_seed(options.seed)
    with measuring(22) as observe:
        records = suite.run(bench, out, observe)
    return publish(records, out / "linear.jsonl", _tables(records), _skipped(records), as_json=options.json)


def _skipped(records: Sequence[Record]) -> list[str]:
    """A line a reason."""
    skipped = (record for record in records if record.metric == "skipped")
    return [*dict.fromkeys(f"Skipped: {record.peer}: {record.case['reason']}" for record in skipped)]


def _tables(records: Sequence[Record]) -> list[Table]:
    """What is always measured, and apart from it what was drawn at random."""
    listed, at_random = drawn.apart(records)
    titles = {"Linear layers": listed, "Sizes drawn at random": at_random}
    return [_table(title, found) for title, found in titles.items() if found]


def _table(title: str, records: Sequence[Record]) -> Table:
    """A line a product and format: each peer's time, share of the copy bandwidth, and share of the floor."""
    from rich import box
    from rich.table import Table

    peers = list(dict.fromkeys(record.peer for record in records if record.value is not None))
    table = Table(title=f"{title}, µs a call, shares of copy and floor", box=box.SIMPLE)
    table.add_column("m x k x n")
    table.add_column("format")
    for peer in peers:
        table.add_column(peer, justify="right")
    on_cpu = any(record.case["section"] == "cpu" for record in records)
    lines: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for record in records:
        if record.value is not None:
            case = record.case
            product = f"{case['m']} x {case['k']} x {case['n']}"
            found = lines.setdefault((product, str(case["format"])), {})
            found[record.peer, record.metric] = record.value
    for (product, format), found in lines.items():
        done = {peer for peer, _ in found}
        cells = [_timed(peer, found, on_cpu=on_cpu) if peer in done else "" for peer in peers]
        table.add_row(product, format, *cells)
    return table


def _timed(peer: str, found: Mapping[tuple[str, str], float], *, on_cpu: bool) -> str:
    shares = (found.get((peer, metric)) for metric in ("share_of_copy", "share_of_floor"))
    figures = [f"{found[peer, 'time_us']:.1f}", *(f"{share:.2f}" for share in shares if share is not None)]
    if (peer, "paired_speedup") in found:
        against = "of fp32's speed" if on_cpu else "of our time"
        figures.append(f"{found[peer, 'paired_speedup']:.2f} {against}")
    return "  ".join(figures)
