"""Train a GPT on text, from nothing or from weights you have.

Options left out are the preset's. A run can be stopped at any time and resumed (--out FOLDER
--resume): it continues as if it had never stopped. With --deterministic True (the default
on a CPU) it gives the same bits.
On several GPUs: torchrun --nproc-per-node N -m fuseline train gpt ...
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, make_dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from fuseline.cli.main import EXIT_INTERRUPTED
from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.cli.train_options import FLAGS, config_options, given_options, option
from fuseline.cli.train_progress import TrainProgress, plan_table
from fuseline.errors import InputError
from fuseline.training.config import PRESETS, TrainConfig, continued, is_spread, preset, spread

_DEFAULT_PRESET = "tiny"

# The options of verbs like it, this verb's own, and every field of TrainConfig: one schema, stated there.
Options: Any = make_dataclass(
    "Options",
    [
        option("preset", str, f"one of {', '.join(PRESETS)} (default: {_DEFAULT_PRESET})"),
        ("resume", Annotated[bool, tyro.conf.arg(help="go on with the run in the folder --out")], False),
        option("init_from", Path, "begin with the weights of a run, a nanoGPT checkpoint or a GPT-2"),
        *config_options(TrainConfig, _DEFAULT_PRESET),
    ],
    bases=(Recorded, Seeded),
    frozen=True,
)


def run(options: Any) -> int:
    console = Console(stderr=options.json)
    device = resolve_device(options.device)
    config = _resumed(options) if options.resume else _begun(options)
    folder = options.out or Path("fuseline-out") / f"train-gpt-{datetime.now():%Y%m%d-%H%M%S}"
    if options.dry_run:
        return _tell(config, folder, device, options, console)
    import torch

    from fuseline.training.run_records import write_run_records
    from fuseline.training.train import train

    progress = TrainProgress(console)
    try:
        result = train(
            config,
            progress,
            folder=folder,
            device=device,
            resume=options.resume,
            init_from=options.init_from,
        )
    finally:
        progress.close()
    if os.environ.get("RANK", "0") == "0":
        path = write_run_records(folder, torch.device(device))
        if options.json:
            print(json.dumps({**asdict(result), "folder": str(result.folder), "records": str(path)}))
        else:
            console.print(f"Records: {path}")
    return EXIT_INTERRUPTED if result.outcome == "interrupted" else 0


def _begun(options: Any) -> TrainConfig:
    """The configuration of a new run: the preset's, with what was given."""
    given = given_options(options, TrainConfig)
    if options.init_from is not None:
        from fuseline.training.initial_weights import SHAPE_FIELDS

        for name in SHAPE_FIELDS:
            if name in given:
                flag = FLAGS.get(name, name).replace("_", "-")
                raise InputError(f"--{flag} is decided by the weights of --init-from: leave it out.")
    return preset(options.preset or _DEFAULT_PRESET, **spread(given))


def _resumed(options: Any) -> TrainConfig:
    """The configuration of the run in --out, with what was given where that may change."""
    from fuseline.training.checkpoint import LATEST, peek

    if options.out is None:
        raise InputError("--resume goes on with the run in a folder: name it with --out.")
    if options.preset is not None:
        raise InputError("--resume takes the run's own configuration: leave --preset out.")
    saved, _ = peek(options.out / LATEST)
    given = given_options(options, TrainConfig)
    return continued(saved, spread(given) if is_spread(saved) else given)


def _tell(config: TrainConfig, folder: Path, device: str, options: Any, console: Console) -> int:
    from fuseline.training.dry_run import dry_run

    plan = dry_run(config, folder=folder, device=device, resume=options.resume)
    if options.json:
        print(json.dumps({**asdict(plan), "folder": str(folder), "config": asdict(config)}))
    else:
        console.print(plan_table(plan))
    return 0
