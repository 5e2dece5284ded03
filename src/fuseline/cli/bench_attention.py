"""Attention: every candidate and the pick, by length, in decoding, with masks; and how near the picks come to
the fastest over random problems."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fuseline.cli import drawn
from fuseline.cli.measuring import measuring
from fuseline.cli.names import split_names
from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.cli.publishing import publish
from fuseline.errors import InputError, unknown_name

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.bench.attention.run import AttentionBench, Outcome
    from fuseline.bench.attention.small import SmallBench
    from fuseline.records import Record

DEFAULT_OUT = Path("fuseline-attention")


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    suite: tuple[str, ...] = ()
    """Suites: small (whole layers), short, long, drawn (lengths at which no kernel was tuned), decode, masks,
    picker. All if none is named."""
    budget: str | None = None
    """Stop after this time (90s, 10m); --resume measures the rest."""
    resume: bool = False
    """Leave out what an earlier run into the same folder measured, with the same GPU, torch and commit."""
    flex: bool = True
    """Measure FlexAttention too, which compiles for every shape; of the picker's problems, on 30."""
    every: int = 1
    """Measure only every n-th problem of a suite."""
    only: tuple[str, ...] = ()
    """Only problems whose line, as --dry-run prints it, has one of these texts in it."""
    forms: tuple[str, ...] = ()
    """For the suite small: shared (one projection for all heads, as in the seed), full (a projection for
    each), block (a transformer block around it), bar (full, on a GPU, at four sizes with batch 8). All if
    none is named."""
    drawn: int | None = None
    """For the suite small: lengths drawn from --seed besides, at which no kernel was tuned; their figures
    stand apart. 0 for none; 5 on a GPU and 2 on a processor by default."""
    write_table: Path | None = None
    """Measure problems for the picker instead: typical ones for the table in this file, as those in
    `src/fuseline/ops/attention/shipped/`, and random ones for the networks beside it."""
    problems: int = 1000
    """How many random problems the networks are fitted to."""
    again: tuple[str, ...] = ()
    """With --write-table: candidates whose kernels have changed; they are measured on what is done, too."""
    page: bool = True
    """Build the page over all records at the end, which takes a quarter of a minute after --budget is spent;
    `fuseline report` does it later, too."""
    processes: int = 0
    """How many processes prepare problems side by side on a GPU; one at a time is timed. 0: by the cores."""


def run(options: Options) -> int:
    import torch

    from fuseline.bench.attention import small
    from fuseline.bench.attention.run import AttentionBench, Outcome
    from fuseline.bench.attention.run import run as measure
    from fuseline.bench.attention.side_by_side import processes_for
    from fuseline.bench.attention.small_layers import PEERS
    from fuseline.bench.attention.suites import SUITES
    from fuseline.bench.ladder.budget import parse_duration
    from fuseline.cli.layer_tables import tables as layer_tables

    device = torch.device(resolve_device(options.device))
    known = (small.SECTION, *SUITES)
    suites = split_names(options.suite) or known
    for name in suites:
        if name not in known:
            raise unknown_name("suite of attention", name, known)
    if options.every < 1:
        raise InputError(f"--every {options.every} must be 1 or more.")
    bench = AttentionBench(
        suites=tuple(name for name in suites if name in SUITES),
        device=device,
        budget_seconds=None if options.budget is None else parse_duration(options.budget),
        resume=options.resume,
        with_compiled=options.flex,
        seed=options.seed,
        every=options.every,
        only=options.only,
        processes=options.processes or processes_for(device),
    )
    out = options.out or DEFAULT_OUT
    sweep = small.SmallBench(
        device,
        forms=split_names(options.forms) or tuple(PEERS),
        seed=options.seed,
        every=options.every,
        only=options.only,
        budget_seconds=bench.budget_seconds,
        resume=options.resume,
        drawn=drawn.how_many(options.drawn, named=False, on_gpu=device.type == "cuda"),
    )
    if options.only and options.write_table is not None:
        raise InputError(
            "--only names problems of the suites, and --write-table draws its own. Take one of them."
        )
    if options.only and not (bench.places() or (small.SECTION in suites and sweep.cases())):
        raise InputError(
            f"--only: no problem of {', '.join(suites)} has {' or '.join(options.only)} in its line."
        )
    if options.dry_run:
        _print_plan(bench, sweep if small.SECTION in suites else None, out, as_json=options.json)
        return 0
    if options.write_table is not None:
        return _write_table(bench, options.write_table, options.problems, split_names(options.again), out)
    layers: list[Record] = []
    left = 0
    if small.SECTION in suites:
        begin = time.monotonic()
        with measuring(100) as observe:
            layers, left = small.run_small(sweep, out, observe)
        if bench.budget_seconds is not None:
            bench = replace(bench, budget_seconds=bench.budget_seconds - (time.monotonic() - begin))
    outcome = Outcome()
    if bench.suites:
        with measuring(100) as observe:
            outcome = measure(bench, out, observe)
    outcome.records[:0] = layers
    outcome.left += left
    tables, remarks = _tables_and_remarks(outcome)
    tables[:0] = layer_tables(layers)
    return publish(
        outcome.records,
        out / "attention.jsonl",
        tables,
        remarks,
        width=130,
        as_json=options.json,
        with_page=options.page,
    )


def _write_table(bench: AttentionBench, file: Path, problems: int, again: Sequence[str], out: Path) -> int:
    from fuseline.bench.attention.table import write_table
    from fuseline.ops.attention.choice import check_name

    for name in again:
        check_name(name)
    with measuring(100) as observe:
        found = write_table(
            file,
            out / "times.jsonl",
            problems,
            bench.device,
            budget_seconds=bench.budget_seconds,
            processes=bench.processes,
            with_compiled=bench.with_compiled,
            again=again,
            observe=observe,
        )
    print(
        f"{found.entries} problems in {file}, networks fitted to {found.fitted}; "
        f"{found.left} left for another run."
    )
    return 0


def _print_plan(bench: AttentionBench, sweep: SmallBench | None, out: Path, *, as_json: bool) -> None:
    places: list[tuple[str, str]] = []
    if sweep is not None:
        places += [("small", str(case)) for case in sweep.cases()]
    places += [(suite, str(problem)) for suite, problem in bench.places()]
    if as_json:
        print(json.dumps({"problems": [{"suite": s, "problem": p} for s, p in places]}))
        return
    print(f"{len(places)} problems on {bench.device}:")
    for suite, problem in places:
        print(f"  {suite:<8}{problem}")
    print(f"Records would go to {out / 'attention.jsonl'}.")


def _tables_and_remarks(outcome: Outcome) -> tuple[list[Table], list[str]]:
    """A table a suite, and what to say of the picks."""
    from fuseline.bench.attention.run import summary

    tables, remarks = [], []
    for suite in dict.fromkeys(suite for suite, _ in outcome.results):
        results = [result for name, result in outcome.results if name == suite]
        rows = [(str(r.times.problem), dict(r.times.times_us), r.picked) for r in results]
        tables.append(_table(suite, rows))
        told = summary(results)
        if told.get("problems"):
            remarks.append(
                f"{suite}: the pick is within 3% of the fastest on {told['within_3_percent']:.1%} of "
                f"{told['problems']:.0f} problems, at {told['mean_share']:.3f} of its speed in the mean "
                f"and {told['worst_share']:.3f} at worst; picks that computed something else: "
                f"{told['wrong']:.0f}."
            )
        if "tuned_within_3_percent" in told:
            remarks.append(f"{suite}: after tuning, {told['tuned_within_3_percent']:.1%}.")
    if outcome.left:
        remarks.append(f"{outcome.left} problems were left; --resume goes on with them.")
    return tables, remarks


def _table(suite: str, rows: Sequence[tuple[str, dict[str, float], str | None]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=f"attention, {suite}: µs", box=box.SIMPLE)
    names = list(dict.fromkeys(name for _, times, _ in rows for name in times))
    table.add_column("problem", overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("pick", no_wrap=True)
    for problem, times, picked in rows:
        table.add_row(problem, *(f"{times[n]:.1f}" if n in times else "" for n in names), picked or "")
    return table
