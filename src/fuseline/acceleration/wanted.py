"""What `accelerate` was asked for, of sites."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """As the arguments of `accelerate`; `keep_proofs`: proofs and times of earlier runs are read and kept."""

    train: bool
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    dry_run: bool = False
    time_sites: bool = True
    strict: bool = False
    keep_proofs: bool = True
