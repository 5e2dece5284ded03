"""One thing looked at: what was found, whether that is well, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "warn", "bad"]


@dataclass(frozen=True)
class Check:
    """`absent` is something optional that is not here, `warn` something that works less well than it could,
    `bad` something broken. `mend` is the command or the deed that puts it right."""

    group: str
    name: str
    state: State
    found: str
    mend: str = ""


def usable(checks: list[Check]) -> bool:
    """Whether nothing is broken."""
    return all(check.state != "bad" for check in checks)
