"""What `--help` says, in lines that the terminal's width breaks and no source file's."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

import docstring_parser


def flowing(text: str) -> str:
    """Each paragraph on one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def described(options: type[Any]) -> type[Any]:
    """A dataclass whose fields have their docstrings as help: tyro would keep the ends of their lines."""
    fields = {field.name: field for field in dataclasses.fields(options)}
    for owner in reversed(options.__mro__[:-1]):
        for param in docstring_parser.parse_from_object(owner).params:
            if param.description and param.arg_name in fields:
                fields[param.arg_name].metadata = MappingProxyType({"help": flowing(param.description)})
    return options
