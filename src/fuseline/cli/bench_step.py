"""Whole training steps of a GPT or a Llama: ours and compiled nanoGPT's in turn, in one process.

The last column is the time of the best nanoGPT over ours."""

from __future__ import annotations

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

    from fuseline.bench.step import StepBench
    from fuseline.records import Record

DEFAULT_OUT = Path("fuseline-step")


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    presets: tuple[str, ...] = ()
    """Models: gpt2 and shakespeare on a GPU, tiny on a processor; any preset of our GPTs, and
    llama-1b and the other Llamas (without nanoGPT)."""
    peers: tuple[str, ...] = ()
    """fuseline, fuseline-eager, fuseline-inductor, fuseline-fp8 (beside bf16), nanogpt-eager,
    nanogpt-inductor, nanogpt-reduce-overhead, nanogpt-max-autotune. All if none is named."""
    nanogpt: Path | None = None
    """A copy of nanoGPT's model.py, which this package does not have."""
    batch_size: int | None = None
    """Sequences a step; the preset's own if not given (gpt2: 16, then 64)."""
    seqlen: int | None = None
    """Tokens a sequence; the preset's own if not given."""
    drawn: int | None = None
    """Sequence lengths drawn from --seed besides, at which no kernel was tuned, dealt out to the presets;
    their figures stand apart. 0 for none; 5 on a GPU and 2 on a processor, if no --seqlen is named."""
    precision: str = "auto"
    """bf16, fp32 or tf32; auto: bf16 on a GPU, else fp32."""
    dropout: float | None = None
    """The preset's own if not given."""
    no_bias: bool = False
    """Leave out all biases, as nanoGPT's configuration for GPT-2 does."""
    grad_clip: float = 0.0
    """Largest norm of all gradients together; 0 leaves them as they are."""
    rounds: int = 8
    """Runs of each peer, in turn with the others'."""
    steps: int = 10
    """Steps a run."""


def run(options: Options) -> int:
    from fuseline.bench import step as suite

    bench = _bench(options)
    out = options.out or DEFAULT_OUT
    if options.dry_run:
        _print_plan(bench)
        return 0
    file = out / "step.jsonl"
    with progress(_WORDS) as observe:
        records = suite.run(bench, file, observe)
    skipped = sorted({f"Skipped {r.peer}: {r.case['reason']}." for r in records if r.metric == "skipped"})
    in_fp8 = [
        f"{r.peer}, {r.case['preset']} {r.case['batch']} x {r.case['seqlen_q']}: {r.case['decided']}."
        for r in records
        if r.metric == "layers_in_fp8"
    ]
    remarks = [*skipped, *in_fp8]
    return publish(records, file, _tables(records), remarks, width=140, as_json=options.json)


def _bench(options: Options) -> StepBench:
    import torch

    from fuseline.bench.step import PEERS, StepBench, find_cases

    device = torch.device(resolve_device(options.device))
    on_gpu = device.type == "cuda"
    precision = ("bf16" if on_gpu else "fp32") if options.precision == "auto" else options.precision
    cases = find_cases(
        split_names(options.presets) or (("gpt2", "shakespeare") if on_gpu else ("tiny",)),
        batch_size=options.batch_size,
        seqlen=options.seqlen,
        precision=precision,
        dropout=options.dropout,
        bias=not options.no_bias,
        drawn=drawn.how_many(options.drawn, named=options.seqlen is not None, on_gpu=on_gpu),
        seed=options.seed,
    )
    return StepBench(
        device,
        cases,
        split_names(options.peers) or PEERS,
        options.rounds,
        options.steps,
        options.grad_clip,
        options.nanogpt,
        options.seed,
    )


def _print_plan(bench: StepBench) -> None:
    from fuseline.bench.step.contenders import why_not

    for case in bench.cases:
        print(f"{case}, on {bench.device}:")
        for peer in bench.peers:
            reason = why_not(peer, case, bench.device, bench.nanogpt)
            print(f"  {peer:<24} {f'skipped: {reason}' if reason else ''}".rstrip())


_WORDS = {
    "build": "building and warming up",
    "run": "running",
    "check": "comparing with",
    "skip": "skipping",
}


def _tables(records: Sequence[Record]) -> list[Table]:
    """What is always measured, and apart from it what was drawn at random."""
    listed, at_random = drawn.apart([record for record in records if record.metric != "skipped"])
    title = "One training step"
    tables = [_table(title, listed)]
    return [*tables, _table(f"{title}, lengths drawn at random", at_random)] if at_random else tables


def _table(title: str, records: Sequence[Record]) -> Table:
    return contest_table(
        title,
        records,
        lambda r: f"{r.case['preset']} {r.case['batch']} x {r.case['seqlen_q']}",
        {
            "ms": value("iteration_ms", "{:.2f}"),
            "tokens/s": value("tokens_per_s", "{:,.0f}"),
            "MFU %": value("mfu", "{:.1f}", 100),
            "GiB": value("peak_memory_gib", "{:.1f}"),
            "first 4 s": value("compile_s", "{:.1f}"),
            "loss err": value("loss_error", "{:.1e}"),
            "grad err": value("grad_error", "{:.1e}"),
            "best nanoGPT / this": paired,
            "bf16 / fp8": value("paired_over_bf16", "{:.3f}"),
        },
    )
