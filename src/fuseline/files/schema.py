"""JSON and plain values against a schema: types, ranges, names; every complaint one short line.

A schema is a dataclass or a pydantic model. Values are taken strictly: a number in quotes is text, 1.5 is not
a count, and neither is `true`.
"""

from __future__ import annotations

import functools
import json
import re
import reprlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from fuseline.errors import InputError
from fuseline.files.reading import TEXT_BYTES, read_text

T = TypeVar("T")
DEPTH = 64
"""Levels of lists and objects in a file; a config has four, a tokenizer eight."""
MOST_VALUES = 10_000
"""Values of a config; the longest lists have one a layer."""


_MEMBER = re.compile(r"(constrained-\w+|(list|dict|tuple)\[.*\]|int|float|str|bool)$")
"""What pydantic puts into a place to say which member of a union it speaks of."""


class _Quote(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 2, 3, 4, 4
        self.maxstring = self.maxother = self.maxlong = 60


_quote = _Quote()


def shown(value: object) -> str:
    """`value` as an error quotes it: a line of a few dozen characters, whatever it is."""
    text = _quote.repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def parse_json(text: str | bytes, place: str) -> Any:
    """The value in a text of JSON. `InputError`, naming `place`, if it is not JSON, has NaN or infinities, or
    is nested more than `DEPTH` levels deep."""

    def refuse(constant: str) -> Any:
        raise InputError(f"{place} holds {constant}, which is no number.")

    def finite(digits: str) -> float:
        value = float(digits)
        return refuse(digits[:60]) if value in (float("inf"), float("-inf")) else value

    try:
        value = json.loads(text, parse_constant=refuse, parse_float=finite)
    except RecursionError:
        raise InputError(f"{place} is nested more than {DEPTH} levels deep.") from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{place} is not JSON: {str(error)[:120]}.") from error
    _check_depth(value, place)
    return value


def read_object(path: Path, most: int = TEXT_BYTES) -> dict[str, Any]:
    """The object in a file of JSON; raises as `parse_json` and `read_text`."""
    value = parse_json(read_text(path, most), str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path} does not hold a JSON object.")
    return value


def checked(schema: type[T], data: Mapping[str, Any], place: str, *, extra: str = "ignore") -> T:
    """A `schema` made of plain values, whatever file they come from. `InputError`, naming `place`, for values
    of another type or out of range, for fields that are missing, and (`extra="forbid"`) for unknown ones."""
    _check_few(data, place)
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{place} holds what is no plain value: {str(error)[:120]}.") from error
    return checked_json(schema, text, place, extra=extra)


def checked_json(schema: type[T], text: str | bytes, place: str, *, extra: str = "ignore") -> T:
    """The same from a text of JSON."""
    try:
        value: T = _adapter(cast(Hashable, schema)).validate_json(text, strict=True, extra=extra)  # type: ignore[arg-type]
    except ValidationError as error:
        raise InputError(f"{place}: {_complaint(error)}") from error
    return value


def checked_values(schema: type[T], values: Mapping[str, Any], place: str) -> T:
    """The same from values that JSON held; `schema` is a TypedDict or a pydantic model."""
    try:
        value: T = _adapter(cast(Hashable, schema)).validate_python(values, strict=True)
    except ValidationError as error:
        raise InputError(f"{place}: {_complaint(error)}") from error
    return value


@functools.cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _complaint(error: ValidationError) -> str:
    """The first thing that is wrong, and how many more there are."""
    # A union complains once for each of its members: the places are what counts.
    errors = error.errors(include_url=False)
    places = {tuple(str(part) for part in e["loc"] if not _MEMBER.match(str(part))) for e in errors}
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if not _MEMBER.match(str(part)))[:80]
    kind = first["type"]
    if kind == "missing":
        said = f"it lacks {where}."
    elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
        said = f"{where} is not known."
    elif kind == "json_invalid":
        said = f"it is not JSON ({first['msg'].removeprefix('Invalid JSON: ')[:120]})."
    elif kind == "value_error" and isinstance(first.get("ctx", {}).get("error"), ValueError):
        said = (f"{where}: " if where else "") + str(first["ctx"]["error"])[:400]
    else:
        said = f"{where or 'it'} is {shown(first['input'])}. {first['msg'].replace('Input', 'It', 1)}."
    more = len(places) - 1
    return said + (f" ({more} more are wrong.)" if more > 0 else "")


def _check_few(value: object, place: str) -> None:
    """Refuse what would be endless as text: a pickle may name one list many times over."""
    left, level = MOST_VALUES, [value]
    while level and left > 0:
        inner = level.pop()
        parts = list(inner.values()) if isinstance(inner, dict) else inner
        if isinstance(parts, (list, tuple)):
            level += parts
            left -= len(parts)
    if left <= 0:
        raise InputError(f"{place} holds more than {MOST_VALUES:,} values.")


def _check_depth(value: object, place: str) -> None:
    level = [value]
    for _ in range(DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise InputError(f"{place} is nested more than {DEPTH} levels deep.")
