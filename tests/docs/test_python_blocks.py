"""The documents' Python runs as it stands there, block after block, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .documents import DOCUMENTS, blocks, name

WITH_PYTHON = [document for document in DOCUMENTS if blocks(document, "python")]


def test_there_is_something_to_run() -> None:
    assert len(WITH_PYTHON) >= 6


@pytest.mark.parametrize("document", WITH_PYTHON, ids=name)
def test_python_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "documentation"}
    for number, block in enumerate(blocks(document, "python"), 1):
        exec(compile(block, f"{name(document)}, block {number}", "exec"), scope)
