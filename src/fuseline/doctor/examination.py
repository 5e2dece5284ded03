"""All checks, in the order in which they build on each other."""

from __future__ import annotations

from fuseline.doctor import software
from fuseline.doctor.check import Check


def examine() -> list[Check]:
    """Look at this machine. Builds the native library if it was never built.

    Where torch cannot be imported nothing behind it can be looked at, and the list ends there.
    """
    checks = list(software.checks())
    if checks[-1].state == "bad":
        return checks
    # These import torch.
    from fuseline.doctor import correctness, gpu, native_core, threads

    for room in (gpu, threads, native_core, correctness):
        checks += room.checks()
    return [*checks, *software.optional()]
