"""A profile in a folder: `profile.json` holds all that its tables are made of, `profile.jsonl` its records,
and beside them lie the traces that Perfetto opens."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseline.errors import InputError, first_line
from fuseline.profiling.profile import Profile
from fuseline.profiling.records import records_of

PROFILE, RECORDS = "profile.json", "profile.jsonl"
FORMAT = "fuseline profile 1"


def write(profile: Profile, folder: Path | str) -> Path:
    """Write the profile into `folder`, which is made if needed; an earlier profile there is replaced. Returns
    the path of `profile.json`. Raises `InputError` if it cannot be written."""
    folder = Path(folder)
    fields = [f.name for f in dataclasses.fields(Profile) if f.name != "files"]
    content = {"format": FORMAT, **{name: _plain(getattr(profile, name)) for name in fields}}
    lines = "".join(record.to_json() + "\n" for record in records_of(profile))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROFILE).write_text(json.dumps(content), encoding="utf-8")
        (folder / RECORDS).write_text(lines, encoding="utf-8")
        for name, data in profile.files.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise InputError(
            f"Cannot write the profile to {folder}: {error.strerror}. Name another folder."
        ) from error
    return folder / PROFILE


def read(folder: Path | str) -> Profile:
    """The profile in `folder`, without its traces. Raises `InputError` if there is none."""
    path = Path(folder)
    path = path / PROFILE if path.is_dir() else path
    if not path.is_file():
        raise InputError(
            f"There is no profile in {folder}. Name a folder that `fuseline profile --out` wrote."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise InputError(
                f"{path} is not a profile that this version of Fuseline wrote. Profile the step again."
            )
        profile: Profile = _made(Profile, content)
        return profile
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"Cannot read a profile from {path}: {first_line(error)}") from error


def _plain(value: Any) -> Any:
    """Dataclasses as their fields' values in order, which takes half of what their names would."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


def _made(kind: Any, value: Any) -> Any:
    """`value`, as `_plain` left it, as the type that it had."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if value is None:
        return None
    if origin in (typing.Union, types.UnionType):
        return _made(next(a for a in arguments if a is not type(None)), value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        given = value if isinstance(value, dict) else dict(zip((f.name for f in fields), value, strict=True))
        return kind(**{f.name: _made(hints[f.name], given[f.name]) for f in fields if f.name in given})  # type: ignore[operator]
    if origin is tuple:
        return tuple(_made(arguments[0], item) for item in value)
    return value
