"""A translation model trained with and without fused kernels: loss curves without dropout, the time of an
epoch in each way to carry out a step, what a step's kernels do, BLEU over seeds; and the BLEU that a recipe
of our own reaches."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fuseline.cli.names import split_names
from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.cli.publishing import publish

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.bench.translation import TranslationBench
    from fuseline.records import Record

DEFAULT_OUT = Path("fuseline-translation")


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    data: str = "grammar"
    """grammar, multi30k, iwslt14, a folder with train.de and train.en, two files a,b, or a TSV file."""
    preset: str = "auto"
    """Model that the kernels are compared on; auto: seed (the course's decoder-only model) on a GPU, tiny on
    a CPU."""
    recipe: str = "auto"
    """Preset trained for its BLEU; auto: multi30k on a GPU, none on a CPU; none leaves it out."""
    parts: tuple[str, ...] = ()
    """curves, epochs, work, quality, recipe. All if none is named."""
    executions: tuple[str, ...] = ()
    """Ways to carry out a step: eager, graph, inductor, inductor-graph, ...; eager, graph, inductor-graph if
    none."""
    precisions: tuple[str, ...] = ()
    """fp32, tf32, bf16; fp32 and bf16 on a GPU, fp32 on a CPU if none. What compiles runs in the last one."""
    epochs: float = 20.0
    """Epochs of each model whose BLEU is counted; fewer if the budget wants it."""
    seeds: int = 5
    """Models for each set of kernels whose BLEU is counted."""
    curve_steps: int = 200
    """Steps of the loss curves."""
    recipe_epochs: float | None = None
    """Epochs of the recipe, in place of its preset's."""
    budget: str = "8m"
    """Time to spend: 8m, 90s, or none. What is trained for BLEU comes last and takes what is left."""


def run(options: Options) -> int:
    from fuseline.bench import translation as suite

    bench = _bench(options)
    out = options.out or DEFAULT_OUT
    if options.dry_run:
        _print_plan(bench, out, as_json=options.json)
        return 0
    with _progress() as observe:
        records = suite.run(bench, out, observe)
    return publish(records, out / "translation.jsonl", [_table(records)], as_json=options.json)


def _bench(options: Options) -> TranslationBench:
    import torch

    from fuseline.bench.ladder.budget import parse_duration
    from fuseline.bench.translation import PARTS, TranslationBench
    from fuseline.training.translation_config import preset

    device = torch.device(resolve_device(options.device))
    on_gpu = device.type == "cuda"
    name = ("seed" if on_gpu else "tiny") if options.preset == "auto" else options.preset
    recipe_name = ("multi30k" if on_gpu else "none") if options.recipe == "auto" else options.recipe
    recipe = None
    if recipe_name != "none":
        recipe = preset(recipe_name, data=options.data, seed=options.seed)
        if options.recipe_epochs is not None:
            recipe = replace(recipe, epochs=options.recipe_epochs)
    return TranslationBench(
        device=device,
        config=preset(name, data=options.data, seed=options.seed),
        recipe=recipe,
        parts=split_names(options.parts) or PARTS,
        executions=split_names(options.executions) or ("eager", "graph", "inductor-graph"),
        precisions=split_names(options.precisions) or (("fp32", "bf16") if on_gpu else ("fp32",)),
        epochs=options.epochs,
        seeds=options.seeds,
        curve_steps=options.curve_steps,
        budget_s=parse_duration(options.budget) or math.inf,
    )


def _print_plan(bench: TranslationBench, out: Path, *, as_json: bool) -> None:
    plan = {
        "parts": list(bench.parts),
        "executions": list(bench.executions),
        "precisions": list(bench.precisions),
        "seeds": bench.seeds,
        "config": asdict(bench.config),
        "recipe": None if bench.recipe is None else asdict(bench.recipe),
    }
    if as_json:
        print(json.dumps(plan))
        return
    for name, value in plan.items():
        print(f"{name:<12} {value}")
    print(f"Records would go to {out / 'translation.jsonl'}.")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being measured, on stderr: a live line on a terminal, a line each elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda now: console.print(now, highlight=False)
        return
    with console.status("") as status:
        yield lambda now: status.update(now)


def _table(records: Sequence[Record]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="A translation model, fused and unfused", box=box.SIMPLE)
    for heading in ("part", "execution", "dtype", "kernels", "metric"):
        table.add_column(heading)
    for heading in ("value", "95% interval"):
        table.add_column(heading, justify="right")
    for record in records:
        if record.metric == "loss" or "seed" in record.case:
            continue  # points of curves and single seeds: the page shows them
        keys = ("section", "execution", "dtype", "kernels")
        cells = [str(record.case.get(key, "")) for key in keys]
        value = str(record.case.get("reason")) if record.value is None else f"{record.value:.5g}"
        interval = "" if record.low is None else f"{record.low:.5g} .. {record.high:.5g}"
        table.add_row(*cells, record.metric, value, interval)
    return table
