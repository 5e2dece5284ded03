"""Draw the tables of README.md and docs/ from the committed records, and those of kernels from the plans that
choose them. `--check` says whether they are current, `--older` which figures are of other kernels than
today's.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; several documents may show the same table. The
line below a table names the device, the version of torch and the days of the records that it is drawn from.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tables import acceleration as accelerations
from tables import (
    attention,
    behind,
    curves,
    front,
    generation,
    hardware,
    ladder,
    linears,
    older,
    ops,
    plans,
    seeds,
    translation,
)
from tables.markdown import source
from tables.older import Source

from fuseline.records import Record, read

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
GPU = "h100"
"""Part of the file names of the records that the suites' tables are drawn from."""

TABLES: dict[str, tuple[str, Callable[[Sequence[Record]], list[str]]]] = {
    "ladder": ("ladder", ladder.ladder),
    "compile": ("compile", ladder.compiling),
    "ops": ("ops", ops.ops),
    "ops-peers": ("ops", ops.against_the_best),
    "head-and-loss": ("ops", ops.head_and_loss),
    "gemv": ("linear", linears.gemv),
    "layers": ("linear", linears.layers),
    "decode": ("decode", generation.decode),
    "climb": ("decode", generation.climb),
    "quality": ("quality", generation.quality),
    "translation": ("translation", translation.translation),
    "bleu": ("translation", translation.bleu),
    "short-attention": ("attention", attention.short),
    "long-attention": ("attention", attention.long),
    "decoding-attention": ("attention", attention.decoding),
    "small-layers": ("attention", attention.small_layers),
    "picks": ("attention", attention.picks),
    "hardware": ("hardware", hardware.hardware),
}
SEEDS: dict[str, tuple[str, Callable[[Sequence[Record]], list[str]]]] = {
    "seed-lstm": ("ops", seeds.lstm),
    "seed-attention-layer": ("attention", seeds.attention_layer),
    "seed-nanogpt": ("ladder", seeds.nanogpt),
    "seed-batches": ("ladder", seeds.batches),
    "seed-head": ("ladder", seeds.head),
    "seed-stability": ("ladder", seeds.stability),
    "seed-fused-kernels": ("ops", seeds.fused_kernels),
    "seed-masked-softmax": ("ops", seeds.masked_softmax),
    "seed-clock": ("quality", seeds.clock),
    "seed-formats": ("quality", generation.quality),
    "seed-memory": ("step", seeds.memory),
    "seed-epoch": ("translation", seeds.translation_epoch),
    "seed-compilers-gpt2": ("compile", functools.partial(seeds.compilers, "gpt2")),
    "seed-compilers-small": ("compile", functools.partial(seeds.compilers, "shakespeare")),
    "seed-machine": ("hardware", seeds.machine),
}
"""Tables of docs/seeds.md: each is drawn from the GPU that has most of it on record."""


@functools.cache
def records(suite: str, gpu: str = GPU) -> tuple[Record, ...]:
    """The committed records of a suite on the GPUs whose file names have `gpu` in them."""
    return tuple(read(*sorted(RESULTS.glob(f"{suite}-*{gpu}*.jsonl*"))))


def step(of: Source) -> list[str]:
    """Whole training steps: the suite `step` once it is on record, else the ladder's and translation's."""
    found = of("step", gpu="nvidia")
    if found:
        return [*front.steps(found), "", source(found)]
    return front.compiled_steps(of("ladder"), of("translation"))


def acceleration(of: Source) -> list[str]:
    """Users' models by `fuseline.accelerate` once they are on record, else the training step of GPT-2."""
    found = of("acceleration", gpu="nvidia")
    if found:
        return [*front.steps(found), "", source(found)]
    return front.step_in_words(of("step", gpu="nvidia"))


def against(of: Source) -> list[str]:
    return front.against({suite: of(suite) for suite in ("decode", "ops", "attention", "linear")})


def where_others_lead(of: Source) -> list[str]:
    suites = ("ops", "attention", "linear", "decode", "translation")
    found = [r for suite in suites for r in of(suite)]
    found += [r for suite in ("step", "acceleration") for r in of(suite, gpu="nvidia")]
    return [*behind.behind(found), "", source(found)]


def accelerated(of: Source) -> list[str]:
    """Users' models by everyone; nothing while none is on record."""
    return accelerations.acceleration(of("acceleration", gpu="nvidia"))


def precision_curves(of: Source) -> list[str]:
    """Trainings in several precisions, by seeds; nothing while none is on record."""
    return curves.precisions(of("quality", gpu="nvidia"))


def older_kernels(of: Source) -> list[str]:
    """What of the benchmarks' page is of other kernels than today's."""
    text = BENCHMARKS.read_text(encoding="utf-8").replace(f"<!-- /{OLDER} -->", "")
    return older.summary([*older.older(text, drawn, of)])


OLDER = "older-kernels"
OTHERS: dict[str, Callable[[Source], list[str]]] = {
    OLDER: older_kernels,
    "step": step,
    "acceleration": acceleration,
    "accelerated": accelerated,
    "precision-curves": precision_curves,
    "against": against,
    "behind": where_others_lead,
    "plans-softmax": lambda of: plans.softmax(),
    "plans-cross-entropy": lambda of: plans.cross_entropy(),
    "plans-norms": lambda of: plans.norms(),
    "plans-attention": lambda of: plans.attention(),
    "plans-small-layers": lambda of: plans.small_layers(),
    "plans-optimizer": lambda of: plans.optimizer(),
}


def drawn(name: str, of: Source = records) -> str:
    """The lines between the two marks of the table `name`, drawn from the records that `of` finds."""
    if name in OTHERS:
        return "\n".join(OTHERS[name](of))
    if name in SEEDS:
        suite, draw = SEEDS[name]
        return "\n".join(seeds.fullest(draw, of(suite, gpu="nvidia")))
    suite, draw = TABLES[name]
    found = of(suite)
    return "\n".join([*draw(found), "", source(found)])


def rewritten(text: str) -> str:
    """A document's text with every table drawn from the records."""
    for name in re.findall(r"<!-- /([\w-]+) -->", text):
        if name not in (known := {**TABLES, **SEEDS, **OTHERS}):
            raise ValueError(f"There is no table named {name!r}; known: {', '.join(known)}.")
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = pattern.sub(lambda m, name=name: m[1] + drawn(name) + "\n" + m[2], text)  # type: ignore[misc]
    return text


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _print_older() -> None:
    for document in documents():
        text = document.read_text(encoding="utf-8").replace(f"<!-- /{OLDER} -->", "")
        for one in older.older(text, drawn, records):
            figures = f"{one.figures} figure" + ("s" if one.figures > 1 else "")
            print(f"{document.relative_to(ROOT)}: {one.name}: {figures}, {one.reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if it would")
    parser.add_argument("--older", action="store_true", help="list figures of older kernels; change nothing")
    options = parser.parse_args()
    if options.older:
        _print_older()
    stale = []
    for document in documents():
        text = document.read_text(encoding="utf-8")
        new = rewritten(text)
        if new != text:
            stale.append(document.relative_to(ROOT))
            if not (options.check or options.older):
                document.write_text(new, encoding="utf-8")
    for document in stale:
        drawn_anew = not (options.check or options.older)
        print(f"{document}: " + ("drawn anew" if drawn_anew else "its tables are out of date"))
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
