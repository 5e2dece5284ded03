"""Errors a user can act on: what is wrong, why, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input, told in one message. The command line prints it alone and exits with code 2."""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> InputError:
    """An `InputError` for a name that is not among `choices`, with the nearest ones suggested."""
    known = list(choices)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else f"Known: {', '.join(known)}."
    return InputError(f"There is no {kind} named {name!r}. {hint}")
