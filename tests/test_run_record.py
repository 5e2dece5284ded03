"""`--record FILE` keeps what became of each test of a run, of one that is killed too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import os
import pytest

def test_holds():
    assert True

@pytest.mark.skip(reason="not here")
def test_skipped():
    assert True

def test_fails():
    assert 1 == 2, "one is not two"

def test_ends_the_run():
    os._exit(9)
"""


def test_a_run_that_is_cut_short_has_told_what_it_saw(tmp_path: Path) -> None:
    here = Path(__file__).parent
    (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--record", "told/run.jsonl"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "FUSELINE_NATIVE": "0"}, capture_output=True, check=False
    )
    assert ended.returncode == 9
    machine, *tests = map(json.loads, (tmp_path / "told" / "run.jsonl").read_text().splitlines())
    assert machine["torch"]
    assert [(one["test"].split("::")[1], one["outcome"]) for one in tests] == [
        ("test_holds", "passed"),
        ("test_skipped", "skipped"),
        ("test_fails", "failed"),
    ]
    assert "one is not two" in tests[2]["error"]
