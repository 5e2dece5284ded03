"""Train a translation model, and measure its BLEU.

The embedded default (German to English, sentences of a grammar of our own) is learned in minutes on two
cores. Options left out are the preset's. A run can be stopped at any time and resumed (--out FOLDER
--resume): it continues as if it had never stopped. With --deterministic True (the default
on a CPU) it gives the same bits. `fuseline translate` uses what was trained.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, make_dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from fuseline.cli.main import EXIT_INTERRUPTED
from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.cli.train_options import config_options, given_options, option
from fuseline.cli.train_progress import TrainProgress
from fuseline.errors import InputError
from fuseline.training.translation_config import PRESETS, TranslateConfig, continued, preset

if TYPE_CHECKING:
    from fuseline.training.translation_train import TranslationResult

_DEFAULT_PRESET = "tiny"

Options: Any = make_dataclass(
    "Options",
    [
        option("preset", str, f"one of {', '.join(PRESETS)} (default: {_DEFAULT_PRESET})"),
        ("resume", Annotated[bool, tyro.conf.arg(help="go on with the run in the folder --out")], False),
        (
            "fused",
            Annotated[bool, tyro.conf.arg(help="compute the memory-bound part by Fuseline's ops")],
            True,
        ),
        *config_options(TranslateConfig, _DEFAULT_PRESET, without=("fused",)),
    ],
    bases=(Recorded, Seeded),
    frozen=True,
)


def run(options: Any) -> int:
    console = Console(stderr=options.json)
    device = resolve_device(options.device)
    config = _resumed(options) if options.resume else _begun(options)
    folder = options.out or Path("fuseline-out") / f"train-translate-{datetime.now():%Y%m%d-%H%M%S}"
    if options.dry_run:
        from fuseline.training.translation_train import check_data

        check_data(config, folder, device, resume=options.resume)
        _tell(config, folder, options, console)
        return 0
    from fuseline.training.translation_train import train_translation

    progress = TrainProgress(console, verb="train translate")
    try:
        result = train_translation(config, progress, folder=folder, device=device, resume=options.resume)
    finally:
        progress.close()
    if os.environ.get("RANK", "0") == "0":
        if options.json:
            print(json.dumps(_plain(result)))
        elif result.bleu is not None:
            console.print(
                f"test BLEU {result.bleu:.2f} with {result.beams} beam(s)\n{result.signature}\n"
                f'To translate: fuseline translate --checkpoint {result.training.folder} "..."',
                highlight=False,
                soft_wrap=True,
            )
    return EXIT_INTERRUPTED if result.training.outcome == "interrupted" else 0


def _begun(options: Any) -> TranslateConfig:
    return preset(options.preset or _DEFAULT_PRESET, **_given(options))


def _resumed(options: Any) -> TranslateConfig:
    """The configuration of the run in --out, with what was given where that may change."""
    from fuseline.training.checkpoint import LATEST, peek_config, settings_of

    if options.out is None:
        raise InputError("--resume goes on with the run in a folder: name it with --out.")
    if options.preset is not None:
        raise InputError("--resume takes the run's own configuration: leave --preset out.")
    saved, _ = peek_config(options.out / LATEST, "translate")
    return continued(settings_of(TranslateConfig, saved, options.out / LATEST), _given(options))


def _given(options: Any) -> dict[str, Any]:
    """The fields named on the command line. A flag cannot tell that it was not given: only --no-fused
    counts."""
    given = given_options(options, TranslateConfig)
    return {name: value for name, value in given.items() if name != "fused" or not value}


def _tell(config: TranslateConfig, folder: Path, options: Any, console: Console) -> None:
    if options.json:
        print(json.dumps({"folder": str(folder), "config": asdict(config)}))
        return
    for name, value in {"folder": folder, **asdict(config)}.items():
        console.print(f"{name:<20}{value}", highlight=False)


def _plain(result: TranslationResult) -> dict[str, Any]:
    plain = asdict(result)
    plain["training"]["folder"] = str(result.training.folder)
    return plain
