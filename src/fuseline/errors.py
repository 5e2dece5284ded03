"""Errors a user can act on: what is wrong, why, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class InputError(ValueError):
    """Bad input. The message says what is wrong, why, and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> InputError:
    """An `InputError` for a name that is not among `choices`. It suggests the nearest ones, in upper or lower
    case. A value that is not text (None, a dtype) is shown as its repr."""
    known = list(choices)
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=3, cutoff=0.5)
    near = [by_lower[one] for one in close]
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else f"Known: {', '.join(known)}."
    return InputError(f"There is no {kind} named {name!r}. {hint}")


def lacks_and_unknown(missing: Sequence[str], foreign: Sequence[str]) -> str:
    """What is wrong with a set of names: the first few that are missing, and the first few unknown ones."""
    return " and ".join(
        f"{verb} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for verb, names in (("lacks", missing), ("has unknown", foreign))
        if names
    )


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or the error's type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]
