"""Train a GPT on real text, or a model of your own (--model), and add one optimization after the other: a
rung each. Report what each rung is worth in time, memory and precision.

Plain PyTorch comes first. Each rung is compared with the best step so far; a rung that is not faster is
shown and left out of the next ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fuseline.cli import ladder_model
from fuseline.cli.ladder_options import Options
from fuseline.cli.names import split_names
from fuseline.cli.options import resolve_device
from fuseline.errors import unknown_name

if TYPE_CHECKING:
    from fuseline.bench.ladder import Outcome, Settings

DEFAULT_OUT = Path("fuseline-ladder")
# What to type after the ladder, each with what it gives.
NEXT = """What to try next:
  fuseline train gpt    train a GPT on text: checkpoints, samples, curves
  fuseline accelerate   what can be made faster in a model of your own, proved before the swap
  fuseline profile      where a training step's time goes
  fuseline report {out}   draw the records again; `fuseline --help` lists every verb"""
DEFAULT_PRESET = {"cpu": "tiny", "cuda": "gpt2"}


def run(options: Options) -> int:
    if options.workload == "generate" and options.model is None:
        from fuseline.cli import ladder_generate

        return ladder_generate.run(options)
    if options.workload not in ("train", "generate"):
        raise unknown_name("workload", options.workload, ("train", "generate"))
    from fuseline.bench import ladder
    from fuseline.cli.ladder_view import LadderView, print_outcome, print_plan

    settings = _settings(options) if options.model is None else ladder_model.settings(options)
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
            if isinstance(settings, ladder.ModelSettings):
                outcome = ladder.run_model(settings, view.observe)
            else:
                outcome = ladder.run(settings, view.observe)
    except KeyboardInterrupt:
        if records_path.exists():
            more = "" if options.model else "; --resume goes on from there"
            view.say(f"What was measured is in {records_path}{more}.")
        raise
    page = _report(settings, records_path)
    if options.json:
        print(json.dumps(_as_json(outcome, records_path, page)))
        return 0
    print_outcome(outcome, settings)
    print(f"Records: {records_path}\nPage:    {page}")
    if options.model is None:
        print(f"\n{NEXT.format(out=records_path.parent)}")
    return 0


def _settings(options: Options) -> Settings:
    from fuseline.bench.ladder import Settings

    device = resolve_device(options.device)
    kind = device.partition(":")[0]
    return Settings(
        preset=DEFAULT_PRESET[kind] if options.preset == "auto" else options.preset,
        device=device,
        out=options.out or DEFAULT_OUT,
        seed=options.seed,
        data=options.data,
        tokenizer=None if options.tokenizer == "auto" else options.tokenizer,
        batch=options.batch_size,
        seqlen=options.seqlen,
        mode=options.mode,
        rungs=split_names(options.rungs),
        budget_seconds=options.budget_seconds(device),
        steps=options.steps,
        runs=options.runs,
        resume=options.resume,
        max_batch=options.max_batch,
        max_autotune=options.max_autotune,
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
        "torch_alone": outcome.torch_alone.name if outcome.torch_alone else None,
        "over_torch": asdict(outcome.over_torch) if outcome.over_torch else None,
        "curve": list(outcome.curve),
        "validation_loss": outcome.validation_loss,
        "sample": outcome.sample,
        "records": str(records_path),
        "page": str(page),
    }
