"""Train a GPT on text, from nothing or from weights you have.

Options left out are the preset's. A run can be stopped at any time and taken up again (--out FOLDER
--resume): it goes on as if it had never stopped.
On several GPUs: torchrun --nproc-per-node N -m fuseline train gpt ...
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields, make_dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Optional, get_args, get_type_hints

import tyro
from rich.console import Console

from fuseline.cli.main import EXIT_INTERRUPTED
from fuseline.cli.options import Common, resolve_device
from fuseline.cli.train_progress import TrainProgress, plan_table
from fuseline.errors import InputError
from fuseline.training.config import PRESETS, TrainConfig, continued, preset

_DEFAULT_PRESET = "tiny"
_METAVARS = {int: "INT", float: "FLOAT", str: "STR", bool: "{True,False}", Path: "PATH"}


def _option(name: str, kind: Any, says: str, default: Any = None) -> tuple[str, Any, Any]:
    """A field of the options that is None unless it is given. `default` is what the help says of it then."""
    plain = next((k for k in get_args(kind) if k is not type(None)), kind)
    hint = "" if default is None else f"({_DEFAULT_PRESET}: {default})"
    about = tyro.conf.arg(help=says, metavar=_METAVARS[plain], help_behavior_hint=hint)
    return name, Annotated[Optional[plain], about], None


_KINDS = get_type_hints(TrainConfig)

# Common's options, this verb's own, and every field of TrainConfig: one schema, stated there.
Options: Any = make_dataclass(
    "Options",
    [
        _option("preset", str, f"one of {', '.join(PRESETS)} (default: {_DEFAULT_PRESET})"),
        ("resume", Annotated[bool, tyro.conf.arg(help="go on with the run in the folder --out")], False),
        _option("init_from", Path, "begin with the weights of a run, a nanoGPT checkpoint or a GPT-2"),
        *(
            _option(f.name, _KINDS[f.name], f.metadata["help"], f.default)
            for f in fields(TrainConfig)
            if f.name != "seed"
        ),
    ],
    bases=(Common,),
    frozen=True,
)


# A preset's seed is Common's --seed, whose default says that none was given.
_DEFAULT_SEED = Common().seed


def run(options: Any) -> int:
    console = Console(stderr=options.json)
    device = resolve_device(options.device)
    config = _resumed(options) if options.resume else _begun(options)
    folder = options.out or Path("fuseline-out") / f"train-gpt-{datetime.now():%Y%m%d-%H%M%S}"
    if options.dry_run:
        return _tell(config, folder, device, options, console)
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
    if options.json and os.environ.get("RANK", "0") == "0":
        print(json.dumps({**asdict(result), "folder": str(result.folder)}))
    return EXIT_INTERRUPTED if result.outcome == "interrupted" else 0


def _begun(options: Any) -> TrainConfig:
    """The configuration of a new run: the preset's, with what was given."""
    given = _given(options)
    if options.init_from is not None:
        from fuseline.training.initial_weights import SHAPE_FIELDS

        for name in SHAPE_FIELDS:
            if name in given:
                raise InputError(
                    f"--{name.replace('_', '-')} is decided by the weights of --init-from: leave it out."
                )
    return preset(options.preset or _DEFAULT_PRESET, **given)


def _resumed(options: Any) -> TrainConfig:
    """The configuration of the run in --out, with what was given where that may change."""
    from fuseline.training.checkpoint import LATEST, peek

    if options.out is None:
        raise InputError("--resume goes on with the run in a folder: name it with --out.")
    if options.preset is not None:
        raise InputError("--resume takes the run's own configuration: leave --preset out.")
    saved, _ = peek(options.out / LATEST)
    return continued(saved, _given(options))


def _given(options: Any) -> dict[str, Any]:
    """The fields of `TrainConfig` named on the command line."""
    given = {
        f.name: getattr(options, f.name)
        for f in fields(TrainConfig)
        if f.name != "seed" and getattr(options, f.name) is not None
    }
    return given if options.seed == _DEFAULT_SEED else {**given, "seed": options.seed}


def _tell(config: TrainConfig, folder: Path, device: str, options: Any, console: Console) -> int:
    from fuseline.training.outlook import outlook

    plan = outlook(config, folder=folder, device=device, resume=options.resume)
    if options.json:
        print(json.dumps({**asdict(plan), "folder": str(folder), "config": asdict(config)}))
    else:
        console.print(plan_table(plan))
    return 0
