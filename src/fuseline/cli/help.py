"""What `--help` says, in lines that the terminal's width breaks and no source file's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_type_hints

import docstring_parser
import tyro

PLAIN = (str, int, float, Path)


def flowing(text: str) -> str:
    """Each paragraph on one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def described(options: type[Any]) -> type[Any]:
    """A dataclass whose fields have their docstrings as help: tyro would keep the ends of their lines.

    Tyro shows each default in parentheses, and None among the values of an optional option. What is off or
    absent unless it is given (False, None, an empty tuple) shows neither.
    """
    fields = {field.name: field for field in dataclasses.fields(options)}
    for owner in reversed(options.__mro__[:-1]):
        for param in docstring_parser.parse_from_object(owner).params:
            if param.description and param.arg_name in fields:
                fields[param.arg_name].metadata = MappingProxyType({"help": flowing(param.description)})
    types = get_type_hints(options, include_extras=True)
    for name, field in fields.items():
        if field.default is None or field.default is False or field.default == ():
            options.__annotations__[name] = Annotated[types[name], _without_default(types[name])]
    return options


def _without_default(kind: Any) -> Any:
    """How tyro shows an option of type `kind` that has no default to tell."""
    named = [one.__name__.upper() for one in get_args(kind) if one in PLAIN]
    optional = len(named) == 1 and type(None) in get_args(kind)
    return tyro.conf.arg(help_behavior_hint="", metavar=named[0] if optional else None)
