"""Errors a user can act on: what is wrong, why, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class InputError(ValueError):
    """Bad input, told in one message. The command line prints it alone and exits with code 2."""


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> InputError:
    """An `InputError` for a name that is not among `choices`, with the nearest ones suggested, whatever the
    case of its letters. What is no text (None, a dtype) is told as Python writes it."""
    known = list(choices)
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=3, cutoff=0.5)
    near = [by_lower[one] for one in close]
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else f"Known: {', '.join(known)}."
    return InputError(f"There is no {kind} named {name!r}. {hint}")


def lacks_and_unknown(missing: Sequence[str], foreign: Sequence[str]) -> str:
    """What ails a set of names: the first of those that it lacks and of those that nobody knows."""
    return " and ".join(
        f"{verb} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for verb, names in (("lacks", missing), ("has unknown", foreign))
        if names
    )


def first_line(error: BaseException) -> str:
    """Of what it says; its type if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
