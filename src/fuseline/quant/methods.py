"""How weights are rounded: which format has which method, and the one that is taken if none is named."""

from __future__ import annotations

from fuseline.errors import InputError, unknown_name
from fuseline.ops.quant_codes import CODES

METHODS = ("nearest", "fitted", "hqq", "gptq")
ROUNDED = ("int8", "int4", "w8a8", *(name for name, codes in CODES.items() if codes.uniform))
"""Formats with evenly spaced values, which every method can round to."""
TABLED = tuple(name for name, codes in CODES.items() if not codes.uniform)
"""Formats whose values a table gives. Weights become the nearest, at scales of the full range or fitted."""


def methods_of(format: str) -> tuple[str, ...]:
    """The methods that round weights to a format. All others have one way only, "nearest"."""
    if format in ROUNDED:
        return METHODS
    return METHODS[:2] if format in TABLED else METHODS[:1]


def chosen_method(format: str, method: str | None, calibrated: bool) -> str:
    """The method to use.

    Raises `InputError` for a method that does not exist, and if the format cannot use the method or batches.
    """
    if method is not None and method not in METHODS:
        raise unknown_name("method", method, METHODS)
    known = methods_of(format)
    if len(known) == 1 and (calibrated or method not in (None, "nearest")):
        given = "calibrate=" if calibrated else f"method={method!r}"
        becomes = {"plain": "stays as it is", "sparse24": "stays as it is, or becomes zero"}
        raise InputError(
            f"{given} goes with {_listed((*ROUNDED, *TABLED))}; {format} has nothing to calibrate or fit: "
            f"each weight {becomes.get(format, 'becomes the nearest number')}. Leave it out."
        )
    if method is not None and method not in known:
        raise InputError(
            f"method={method!r} goes with {_listed(ROUNDED)}, whose values are evenly spaced; {format} has "
            f"{_listed(known)}."
        )
    if method == "gptq" and not calibrated:
        raise InputError(
            'method="gptq" rounds weights for the inputs they will meet: give batches of them as calibrate=, '
            'or take "hqq", which needs none.'
        )
    return method or ("gptq" if calibrated and "gptq" in known else "nearest")


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
