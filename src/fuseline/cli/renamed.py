"""Options that had another name once: one flag has one name in all verbs now, and the old one says so."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fuseline.errors import InputError

RENAMED = {
    "--batch": "--batch-size",
    "--batches": "--batch-size",
    "--block-size": "--seqlen",
    "--dtype": "--precision",
    "--dtypes": "--precision",
}


def check_renamed(verb: str, arguments: Sequence[str], fields: Collection[str]) -> None:
    """`InputError` for an old name of an option that `verb` has; `fields` are those of its options."""
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        new = RENAMED.get(flag)
        if new is not None and _field(flag) not in fields and _field(new) in fields:
            raise InputError(f"`fuseline {verb}` calls {flag} {new} now.")


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
