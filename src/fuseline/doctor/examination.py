"""All checks, in the order in which they build on each other."""

from __future__ import annotations

from fuseline.doctor import software
from fuseline.doctor.check import Check


def examine(*, build: bool = False) -> list[Check]:
    """Look at this machine. With `build` the native library is built if it never was; without, what needs
    it is not tried.

    Where torch cannot be imported nothing behind it can be looked at, and the list ends there.
    """
    checks = list(software.checks())
    if checks[-1].state == "bad":
        return checks
    # These import torch.
    from fuseline.doctor import correctness, gpu, native_core, threads

    unbuilt = [] if build else native_core.unbuilt()
    checks += [*gpu.checks(), *threads.checks(), *native_core.checks(unbuilt)]
    checks += correctness.not_tried() if unbuilt else correctness.checks()
    return [*checks, *software.optional()]
