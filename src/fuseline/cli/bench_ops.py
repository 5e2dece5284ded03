"""Fuseline's ops against their peers (PyTorch eager, torch.compile, Liger, QuACK): error against float64,
time, bandwidth and the share of this machine's copy bandwidth, forward and backward."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fuseline.cli import drawn
from fuseline.cli.measuring import measuring
from fuseline.cli.names import split_names
from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.cli.precisions import TORCH_NAMES, checked
from fuseline.cli.publishing import publish

if TYPE_CHECKING:
    from fuseline.bench.ops import OpsBench, SeedBench
    from fuseline.records import Record
    from fuseline.records.record import Scalar

DEFAULT_OUT = Path("fuseline-ops")
GPU_LENGTHS = (
    *(8, 16, 31, 32, 64, 128, 256, 384, 512, 768, 1000, 1024, 1600, 2048, 3072, 4096, 5120, 8192, 12288),
    *(16384, 32768, 50257, 65536, 131072, 262144),
)
FEW_ROWS = (4, 32, 128, 512)
FEW_ROWS_LENGTHS = (128, 768, 1024, 4096, 16384, 65536)
CPU_LENGTHS = (128, 1024)
# 256 MiB a matrix on a GPU: several times its L2. On a processor small enough to be done in a minute.
GPU_ELEMENTS = {"bfloat16": 2**27, "float16": 2**27, "float32": 2**26, "mixed": 2**26}
CPU_ELEMENTS = dict.fromkeys(GPU_ELEMENTS, 2**20)
LOSS_ROWS = 8192  # tokens of a batch: with a vocabulary beside them, the logits are large enough


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    ops: tuple[str, ...] = ()
    """Ops to measure: softmax, layer_norm, ... All if none is named."""
    precision: tuple[str, ...] = ("bf16", "fp32")
    """bf16, fp16, fp32, or mixed: norms as autocast calls them, a bf16 branch beside a float32 stream."""
    lengths: tuple[int, ...] = ()
    """Row lengths. A matrix has as many rows as make 256 MiB on a GPU, 2^20 elements on a processor."""
    drawn: int | None = None
    """Row lengths drawn from --seed besides, at which no kernel was tuned; their figures stand apart. 0 for
    none; 5 on a GPU and 2 on a processor, if no --lengths are named."""
    peers: tuple[str, ...] = ()
    """Who to measure: fuseline, eager, inductor, max-autotune, liger, quack, apex, transformer-engine. All if
    none is named; a note lists those that are not installed."""
    elements: int | None = None
    """Elements of a matrix, in place of the default: small ones are also timed inside a CUDA graph."""
    few_rows: bool = False
    """Matrices of 4, 32, 128 and 512 rows instead, timed inside a CUDA graph over rotating inputs."""
    rows: tuple[int, ...] = ()
    """Numbers of rows in place of those of --few-rows."""
    seed_shapes: bool = False
    """Softmax and LayerNorm at the shapes of the course's homework, against their op-by-op composition, too;
    and softmax with masks, scaled and causal. --ops, --peers, --quick, --budget, --resume and --jobs hold for
    it."""
    budget: Annotated[str | None, tyro.conf.arg(metavar="MINUTES")] = None
    """Stop before a case that would not be done in time (90s, 4m); --resume goes on from there."""
    resume: bool = False
    """Leave out what --out holds already from this GPU, torch and commit."""
    jobs: int | None = None
    """Processes that compile for the peers beforehand; 0 for none, by default one a core on a GPU machine."""
    quick: bool = False
    """One dtype, one length, few repeats: to see that it runs."""


def run(options: Options) -> int:
    from fuseline.cli.ops_tables import tables

    out = options.out or DEFAULT_OUT
    bench = _seed_bench(options) if options.seed_shapes else _bench(options)
    if options.dry_run:
        _print_plan(bench, out, as_json=options.json)
        return 0
    records, left = _measured(bench, out)
    skipped = (record for record in records if record.metric == "skipped")
    remarks = [f"{record.peer} skipped, {_place(record)}: {record.case['reason']}" for record in skipped]
    if left:
        remarks.append(f"The budget left out {len(left)} cases, from {left[0]} on; --resume measures them.")
    return publish(
        records, out / "ops.jsonl", tables(records), remarks, width=150, as_json=options.json, left=left
    )


def _measured(bench: OpsBench | SeedBench, out: Path) -> tuple[list[Record], list[str]]:
    """The records, and what the budget left out."""
    from fuseline.bench import ops as suite

    with measuring(48) as observe:
        if isinstance(bench, suite.SeedBench):
            return suite.run_seed(bench, out, observe)
        outcome = suite.run(bench, out, observe)
    return outcome.records, [place.words() for place in outcome.left]


def _dtypes(options: Options) -> tuple[str, ...]:
    """torch's names of the precisions asked for. `mixed` is our own name."""
    known = {**TORCH_NAMES, "mixed": "mixed"}
    return tuple(known[checked(name, known)] for name in split_names(options.precision))


def _bench(options: Options) -> OpsBench:
    import torch

    from fuseline.bench.compiling import default_jobs
    from fuseline.bench.ladder.budget import parse_duration
    from fuseline.bench.ops import Effort, OpsBench
    from fuseline.bench.peers import PEERS

    device = torch.device(resolve_device(options.device))
    on_gpu = device.type == "cuda"
    rows = options.rows or (FEW_ROWS if options.few_rows else ())
    many = (FEW_ROWS_LENGTHS if rows else GPU_LENGTHS) if on_gpu else CPU_LENGTHS
    elements = GPU_ELEMENTS if on_gpu else CPU_ELEMENTS
    if options.elements is not None:
        elements = dict.fromkeys(elements, options.elements)
    # On a processor all rounds disagree.
    effort = Effort(rounds=6, repeats=10, most_rounds=15 if on_gpu else 6)
    return OpsBench(
        device=device,
        lengths=options.lengths or ((1024,) if options.quick else many),
        elements=elements,
        effort=Effort(rounds=2, repeats=5) if options.quick else effort,
        ops=split_names(options.ops),
        dtypes=_dtypes(options)[: 1 if options.quick else None],
        peers=split_names(options.peers) or tuple(PEERS),
        rows=rows,
        own_lengths=not (options.lengths or options.quick),
        drawn=drawn.how_many(options.drawn, named=bool(options.lengths) or options.quick, on_gpu=on_gpu),
        loss_rows=LOSS_ROWS if on_gpu and options.elements is None else None,
        jobs=default_jobs(device) if options.jobs is None else options.jobs,
        budget_seconds=None if options.budget is None else parse_duration(options.budget),
        resume=options.resume,
        seed=options.seed,
    )


def _print_plan(bench: OpsBench | SeedBench, out: Path, *, as_json: bool) -> None:
    from fuseline.bench.ops import SeedBench

    absent = {peer.name: peer.why_not(bench.device) for peer in bench.contenders}
    if isinstance(bench, SeedBench):
        cases = [dict(shape.case) for shape in bench.shapes]
        lines, how = [str(shape) for shape in bench.shapes], "forward and backward"
    else:
        cases = [place.key() for place in bench.places()]
        lines = [_line(case) for case in cases]
        how = "inside a CUDA graph" if bench.only_captured else "forward and backward"
    if as_json:
        print(json.dumps({"cases": cases, "peers": absent}))
        return
    print(f"{len(cases)} cases on {bench.device}, {how}:")
    for line in lines:
        print(f"  {line}")
    for peer, reason in absent.items():
        print(f"peer {peer:<12} {f'skipped: {reason}' if reason else 'here'}")
    print(f"Records would go to {out / 'ops.jsonl'}.")


def _line(case: Mapping[str, Scalar]) -> str:
    return "{op:<24} {dtype:<10} {rows} x {n}".format(**case) + ("  (drawn)" if "drawn" in case else "")


def _seed_bench(options: Options) -> SeedBench:
    import torch

    from fuseline.bench.compiling import default_jobs
    from fuseline.bench.ladder.budget import parse_duration
    from fuseline.bench.ops import SeedBench
    from fuseline.bench.peers import PEERS

    device = torch.device(resolve_device(options.device))
    return SeedBench(
        device,
        ops=split_names(options.ops),
        peers=split_names(options.peers) or tuple(PEERS),
        quick=options.quick,
        jobs=default_jobs(device) if options.jobs is None else options.jobs,
        budget_seconds=None if options.budget is None else parse_duration(options.budget),
        resume=options.resume,
        seed=options.seed,
    )


def _place(record: Record) -> str:
    keys = ("op", "dtype", "rows", "n")
    return " ".join(str(record.case[key]) for key in keys if key in record.case)
