"""Threads that wait for each other sleep before they cost others a core, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fuseline.cli.waiting import SPINS, spin_briefly

ASKED = """
import os, sys
from fuseline.cli import main
main.run = lambda arguments: print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules) or 0
main.main([])
"""


@pytest.mark.parametrize(
    "said, spins",
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_what_the_user_says_stands(monkeypatch, said, spins):
    monkeypatch.setattr(os, "environ", dict(said))
    spin_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_it_is_said_before_torch_is_there(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [SPINS, "False"]
