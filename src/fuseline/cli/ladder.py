"""Climb the five levers on a GPT that trains on real text, rung by rung, and report what each is worth: time,
memory, precision. Plain PyTorch is the ground; a rung that does not pay is shown and left out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.errors import unknown_name

if TYPE_CHECKING:
    from fuseline.bench.ladder import Outcome, Settings

DEFAULT_OUT = Path("fuseline-ladder")
DEFAULT_BUDGET = {"cpu": "4m", "cuda": "8m"}
DEFAULT_PRESET = {"cpu": "tiny", "cuda": "gpt2"}


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    workload: str = "train"
    """train: a GPT that trains on text; generate: a language model with random weights, token by token (of
    the options below --preset, --checkpoint, --batch and --rungs count)."""
    preset: str = "auto"
    """tiny, shakespeare, gpt2, gpt2-medium, gpt2-large, gpt2-xl; auto: gpt2 on a GPU, else tiny."""
    checkpoint: Path | None = None
    """With generate: folder of a run of `fuseline train gpt`, for its model in the place of a preset's; each
    rung then shows its perplexity on the text held out."""
    data: str = "python"
    """Text to train on: python (this interpreter's standard library), shakespeare, openwebtext, or the path
    of a file or folder."""
    tokenizer: str = "auto"
    """char, bpe (trained on the text) or gpt2; auto: char for shakespeare, bpe for the rest."""
    batch: int | None = None
    """Sequences a step (default: the preset's)."""
    seqlen: int | None = None
    """Tokens a sequence (default: the preset's)."""
    mode: str = "cumulative"
    """cumulative: slot by slot, keeping what pays; alone: each rung upon plain PyTorch; combination: named
    sets."""
    rungs: tuple[str, ...] = ()
    """Rungs, slots (precision, attention, ...) or combinations (seed-001, seed-003, anchors) to run,
    separated by spaces or commas. All rungs if none is named."""
    budget: Annotated[str | None, tyro.conf.arg(metavar="MINUTES")] = None
    """Time for the whole ladder: 4, 90s, 1.5h or none. Rungs it does not reach are listed; a first build of
    the kernels counts for two fifths of it at most. Default: 4 minutes on a processor, 8 on a GPU."""
    steps: int = 20
    """Most steps in a timed run; fewer where the budget asks for it."""
    runs: int = 5
    """Timed runs of each rung, each in turn with one of the rung it is compared with."""
    resume: bool = False
    """Go on from the records in the output folder: rungs on record for this machine are not run again."""
    max_batch: str = "kept"
    """Largest batches (GPU only): none; fit: predicted from two sizes; kept: tried out, in a process of its
    own, for the eager rungs that were kept and the fastest rung; all: tried out for every rung."""


def run(options: Options) -> int:
    if options.workload == "generate":
        from fuseline.cli import ladder_generate

        return ladder_generate.run(options)
    if options.workload != "train":
        raise unknown_name("workload", options.workload, ("train", "generate"))
    from fuseline.bench import ladder
    from fuseline.cli.ladder_view import LadderView, print_outcome, print_plan

    settings = _settings(options)
    if options.dry_run:
        lines = ladder.plan(settings)
        if options.json:
            print(json.dumps({"preset": settings.preset, "rungs": [asdict(line) for line in lines]}))
        else:
            print_plan(lines, settings)
        return 0
    records_path = settings.out / ladder.RECORDS
    try:
        with LadderView() as view:
            outcome = ladder.run(settings, view.observe)
    except KeyboardInterrupt:
        if records_path.exists():
            view.say(f"What was measured is in {records_path}; --resume goes on from there.")
        raise
    page = _report(settings, records_path)
    if options.json:
        print(json.dumps(_as_json(outcome, records_path, page)))
        return 0
    print_outcome(outcome, settings)
    print(f"Records: {records_path}\nPage:    {page}")
    return 0


def _settings(options: Options) -> Settings:
    from fuseline.bench.ladder import Settings
    from fuseline.bench.ladder.budget import parse_duration

    device = resolve_device(options.device)
    kind = device.partition(":")[0]
    return Settings(
        preset=DEFAULT_PRESET[kind] if options.preset == "auto" else options.preset,
        device=device,
        out=options.out or DEFAULT_OUT,
        seed=options.seed,
        data=options.data,
        tokenizer=None if options.tokenizer == "auto" else options.tokenizer,
        batch=options.batch,
        seqlen=options.seqlen,
        mode=options.mode,
        rungs=tuple(name for part in options.rungs for name in part.split(",") if name),
        budget_seconds=parse_duration(options.budget or DEFAULT_BUDGET[kind]),
        steps=options.steps,
        runs=options.runs,
        resume=options.resume,
        max_batch=options.max_batch,
    )


def _report(settings: Settings, records_path: Path) -> Path:
    from fuseline import report
    from fuseline.records import read

    return report.build(read(records_path), settings.out)


def _as_json(outcome: Outcome, records_path: Path, page: Path) -> dict[str, object]:
    rungs = [
        {
            **result.case(),
            "reason": result.reason,
            "figures": {name: asdict(figure) for name, figure in result.measurement.figures.items()},
            "names": result.measurement.kernels,
        }
        for result in outcome.results
    ]
    return {
        "rungs": rungs,
        "best": outcome.best.name if outcome.best else None,
        "curve": list(outcome.curve),
        "validation_loss": outcome.validation_loss,
        "sample": outcome.sample,
        "records": str(records_path),
        "page": str(page),
    }
