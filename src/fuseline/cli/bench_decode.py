"""Tokens a second of a language model with random weights, by rows and format: Fuseline against the same
model in plain torch, compiled as gpt-fast does it, gpt-fast's own files, and `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fuseline.cli import drawn
from fuseline.cli.measuring import measuring
from fuseline.cli.names import split_names
from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.cli.publishing import publish

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.records import Record

DEFAULT_OUT = Path("fuseline-decode")
POSITIONS = (200,)


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    preset: str = "auto"
    """Shape of the model: llama2-7b, llama3-8b, gpt2, ..; auto: llama2-7b on a GPU, else llama-tiny."""
    batch_size: tuple[int, ...] = (1, 8)
    """Rows decoded together."""
    positions: tuple[int, ...] = POSITIONS
    """Places in the context around which steps are timed."""
    drawn: int | None = None
    """Positions drawn from --seed besides, at which no kernel was tuned, with the first number of rows and in
    the first format; their figures stand apart. 0 for none; 5 on a GPU and 2 on a processor, if no other
    --positions are named."""
    capacity: int = 512
    """Positions that the cache has room for."""
    formats: tuple[str, ...] = ()
    """Of bf16, fp32, int8, int4, fp8; on a CPU fp32 and int8 if none is named, on a GPU all but fp32."""
    peers: tuple[str, ...] = ()
    """Of fuseline, eager, gptfast (its method), gptfast-files, transformers, transformers-compiled,
    max-autotune. All but max-autotune, which compiles for minutes, if none is named."""
    gptfast: Path | None = None
    """Folder of a checkout of gpt-fast, of commit c9f683e (before FlexAttention) or 6ecad9b (with it); its
    own files decode too (peer gptfast-files). Its license is its own."""
    steps: int = 10
    """Tokens of a timed run."""
    runs: int = 7
    """Timed runs."""
    budget: Annotated[str | None, tyro.conf.arg(metavar="MINUTES")] = None
    """Leave out what would not be done in time (90s, 4m); --resume measures it."""
    resume: bool = False
    """Measure what the same commit has not measured into the folder yet."""
    jobs: int = 0
    """Processes that compile for the peers beforehand, side by side; 0 for none."""
    own_clock: bool = False
    """Let inductor tune by its own clock, 0.1 s for each configuration, and not by a brief one. Its peers are
    recorded under names of their own, so that both stand and the better counts."""


def run(options: Options) -> int:
    import torch

    from fuseline.bench import decode as suite
    from fuseline.bench.ladder.budget import parse_duration

    device = torch.device(resolve_device(options.device))
    on_gpu = device.type == "cuda"
    bench = suite.DecodeBench(
        device,
        ("llama2-7b" if on_gpu else "llama-tiny") if options.preset == "auto" else options.preset,
        options.batch_size,
        options.positions,
        options.capacity if on_gpu or options.capacity != 512 else 256,
        split_names(options.formats) or (("bf16", "int8", "int4", "fp8") if on_gpu else ("fp32", "int8")),
        split_names(options.peers) or suite.DEFAULTS,
        options.steps,
        options.runs,
        options.seed,
        None if options.budget is None else parse_duration(options.budget),
        options.resume,
        jobs=options.jobs,
        gptfast=options.gptfast,
        own_clock=options.own_clock,
        drawn=drawn.how_many(options.drawn, named=options.positions != POSITIONS, on_gpu=on_gpu),
    )
    out = options.out or DEFAULT_OUT
    if options.dry_run:
        what = f"{bench.preset}: {len(bench.problems())} measurements by {', '.join(bench.peers)}"
        print(f"{what} on {bench.device}. Records would go to {out / 'decode.jsonl'}.")
        return 0
    with measuring(28) as observe:
        records = suite.run(bench, out, observe)
    remarks = skipped(records)
    left = suite.left(bench, out)
    if left:
        remarks.append(f"The budget left out {len(left)} measurements; --resume takes them up.")
    return publish(records, out / "decode.jsonl", _tables(records), remarks, as_json=options.json)


def skipped(records: Sequence[Record]) -> list[str]:
    """A line a peer and reason."""
    left = (record for record in records if record.metric == "skipped")
    return [*dict.fromkeys(f"Skipped: {record.peer}: {record.case['reason']}" for record in left)]


def _tables(records: Sequence[Record]) -> list[Table]:
    """What is always measured, and apart from it what was drawn at random."""
    listed, at_random = drawn.apart(records)
    titles = {"Decoding": listed, "Decoding, positions drawn at random": at_random}
    return [_table(title, found) for title, found in titles.items() if found]


def _table(title: str, records: Sequence[Record]) -> Table:
    from rich import box
    from rich.table import Table

    metrics = ("tokens_per_s", "iteration_ms", "share_of_copy", "ttft_ms", "peak_memory_gib")
    table = Table(title=title, box=box.SIMPLE)
    for heading in ("rows", "position", "format", "by"):
        table.add_column(heading)
    for heading in ("tokens/s", "ms a step", "share of copy", "first token, ms", "memory, GiB"):
        table.add_column(heading, justify="right")
    lines: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for record in records:
        if record.value is not None:
            case = record.case
            line = str(case["batch"]), str(case["position"]), str(case["format"]), record.peer
            lines.setdefault(line, {})[record.metric] = record.value
    for line, found in lines.items():
        table.add_row(*line, *(f"{found[m]:,.4g}" if m in found else "" for m in metrics))
    return table
