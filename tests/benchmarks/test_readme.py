"""The README's figures are those of the committed records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_tables_are_drawn_from_the_records() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "readme.py"), "--check"])
    assert done.returncode == 0, "run `python benchmarks/readme.py`: records have changed since"
