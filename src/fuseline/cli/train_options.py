"""The fields of a training configuration as options of a command line: one schema, stated in the
configuration."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional, get_args, get_type_hints

import tyro

from fuseline.cli.options import Seeded

_METAVARS = {int: "INT", float: "FLOAT", str: "STR", bool: "{True,False}", Path: "PATH"}

# Fields of a configuration whose option has the name that it has in all verbs.
FLAGS = {"block_size": "seqlen"}

# A preset's seed is Seeded's --seed, whose default says that none was given.
_DEFAULT_SEED = Seeded().seed


def option(name: str, kind: Any, says: str, default: Any = None, preset: str = "") -> tuple[str, Any, Any]:
    """A field of the options that is None unless it is given. `default` is what the help says that it is
    then, in `preset`."""
    plain = next((k for k in get_args(kind) if k is not type(None)), kind)
    hint = "" if default is None else f"({preset}: {default})"
    about = tyro.conf.arg(help=says, metavar=_METAVARS[plain], help_behavior_hint=hint)
    return name, Annotated[Optional[plain], about], None


def config_options(config: type, preset: str, *, without: tuple[str, ...] = ()) -> list[tuple[str, Any, Any]]:
    """An option for each field of the configuration but the seed, which every verb has, and those in
    `without`."""
    kinds = get_type_hints(config)
    return [
        option(FLAGS.get(f.name, f.name), kinds[f.name], f.metadata["help"], f.default, preset)
        for f in fields(config)
        if f.name not in ("seed", *without)
    ]


def given_options(options: Any, config: type) -> dict[str, Any]:
    """The fields of the configuration that were named on the command line."""
    given = {
        f.name: value
        for f in fields(config)
        if f.name != "seed" and (value := getattr(options, FLAGS.get(f.name, f.name))) is not None
    }
    return given if options.seed == _DEFAULT_SEED else {**given, "seed": options.seed}
