"""How long a thread of OpenMP spins for another before it sleeps."""

from __future__ import annotations

import os

# About 0.4 ms. libgomp, which torch's wheels for Linux carry, spins 300,000 times unless told otherwise, and
# where another process has taken a core, a training step of 43 ms then takes two seconds: its threads spin on
# the core that the one they wait for should have. docs/experiments/measuring.md has the times.
SPINS = "10000"


def spin_briefly() -> None:
    """Say so to libgomp, unless the user has said how threads are to wait. It reads this once, when torch is
    imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
