"""Time models that people use in turn: unchanged, compiled, with Liger's kernels, and accelerated.

Each row is a training step or a forward pass with weights in bf16. Ours are `fuseline`, a recorded step
(`training_step` or `compiled_call`), and `fuseline-eager`, the accelerated model in the user's own loop. The
last column is the time of the fastest of the others over ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuseline.cli import drawn
from fuseline.cli.contests import contest_table, paired, progress, value
from fuseline.cli.names import split_names
from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.cli.publishing import publish

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.bench.acceleration import AccelerationBench
    from fuseline.records import Record

DEFAULT_OUT = Path("fuseline-acceleration")


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    cases: tuple[str, ...] = ()
    """llama-1b, qwen2-0.5b, gpt2, bert-base, vit-b16, encoder, bert-base-forward, llama-1b-prefill. All if
    none is named; several on a GPU run in a process each."""
    peers: tuple[str, ...] = ()
    """eager, inductor, fuseline, fuseline-eager, reduce-overhead, liger, max-autotune, in this order. All but
    max-autotune if none is named."""
    preset: str = "auto"
    """full, or small: the same architectures shrunk for a processor. auto: full on a GPU, else small."""
    drawn: int | None = None
    """Lengths drawn from --seed besides, at which no kernel was tuned, dealt out to the cases but for images;
    their figures stand apart. 0 for none; 5 on a GPU and 2 on a processor, if no --cases are named."""
    precision: str = "auto"
    """Of the weights: bf16 or fp32; auto: bf16 on a GPU, else fp32."""
    seconds: float = 10.0
    """Time for timing a case, the turns of all peers together; getting ready comes on top."""
    rounds: int = 10
    """Turns of each peer, at least 6."""
    budget: str = "none"
    """Time for the whole run: 8 (minutes), 90s, 1.5h or none. Cases that do not fit into it are left out."""


def run(options: Options) -> int:
    from fuseline.bench import acceleration as suite

    bench = _bench(options)
    out = options.out or DEFAULT_OUT
    if options.dry_run:
        _print_plan(bench)
        return 0
    file = out / "acceleration.jsonl"
    with progress(_WORDS) as observe:
        records = suite.run(bench, file, observe)
    return publish(records, file, _tables(records), _remarks(records), width=140, as_json=options.json)


def _bench(options: Options) -> AccelerationBench:
    import torch

    from fuseline.bench.acceleration import DEFAULTS, AccelerationBench
    from fuseline.bench.ladder.budget import parse_duration

    device = torch.device(resolve_device(options.device))
    on_gpu = device.type == "cuda"
    cases = split_names(options.cases)
    count = drawn.how_many(options.drawn, named=bool(cases), on_gpu=on_gpu)
    return AccelerationBench(
        device,
        cases,
        drawn=count,
        preset=("full" if on_gpu else "small") if options.preset == "auto" else options.preset,
        dtype=("bf16" if on_gpu else "fp32") if options.precision == "auto" else options.precision,
        peers=split_names(options.peers) or DEFAULTS,
        seconds=options.seconds,
        rounds=options.rounds,
        budget_s=parse_duration(options.budget) or math.inf,
        seed=options.seed,
        apart=on_gpu and (len(cases) != 1 or count > 0),
    )


def _print_plan(bench: AccelerationBench) -> None:
    from fuseline.bench.acceleration.contenders import why_not

    for case in bench.found():
        print(f"{case}, {bench.dtype}, on {bench.device}:")
        for peer in bench.contenders:
            reason = why_not(peer, bench.device)
            print(f"  {peer:<16} {f'skipped: {reason}' if reason else ''}".rstrip())


_WORDS = {
    "reference": "computing in",
    "prepare": "getting ready",
    "run": "running",
    "skip": "leaving out",
}


def _tables(records: Sequence[Record]) -> list[Table]:
    """What is always measured, and apart from it what was drawn at random."""
    listed, at_random = drawn.apart(records)
    title = "Models unchanged and accelerated"
    tables = [_table(title, listed)]
    return [*tables, _table(f"{title}, lengths drawn at random", at_random)] if at_random else tables


def _table(title: str, records: Sequence[Record]) -> Table:
    loss, output = value("loss_error", "{:.1e}"), value("error", "{:.1e}")
    return contest_table(
        title,
        records,
        lambda r: f"{r.case['model']}, {r.case['task']}, {r.case['batch']} x {r.case['seqlen_q']}",
        {
            "ms": value("iteration_ms", "{:.2f}"),
            "GiB": value("peak_memory_gib", "{:.1f}"),
            "ready s": value("compile_s", "{:.1f}"),
            "loss or output err": lambda row: loss(row) or output(row),
            "grad err": value("grad_error", "{:.1e}"),
            "best of the others / this": paired,
        },
    )


def _remarks(records: Sequence[Record]) -> list[str]:
    """What was put into each model, and a line for each reason why a peer was left out."""
    told = [
        f"{r.case['model']}, {r.case['task']}, {r.peer}: {r.case['names']}"
        for r in records
        if r.metric == "kernels"
    ]
    places: dict[tuple[str, str], list[str]] = {}
    for r in records:
        if r.metric == "skipped":
            where = f"{r.case['model']}, {r.case['task']}"
            places.setdefault((r.peer, str(r.case["reason"])), []).append(where)
    return [*told, *(f"Left out {peer} of {'; '.join(of)}: {why}." for (peer, why), of in places.items())]
