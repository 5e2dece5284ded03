"""The words for a number format, the same in every verb: fp32, tf32, bf16, fp16, fp8."""

from __future__ import annotations

from collections.abc import Collection

from fuseline.errors import InputError, unknown_name

# torch's own names, as older command lines have them.
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def checked(precision: str, allowed: Collection[str]) -> str:
    """`precision` if it is one of `allowed`, else `InputError`: under torch's own name it gets the word for
    it suggested."""
    if precision in allowed:
        return precision
    word = next((word for word, name in TORCH_NAMES.items() if name == precision), None)
    if word in allowed:
        raise InputError(f"--precision {precision} is written {word}.")
    raise unknown_name("precision", precision, allowed)
