"""examples/notebooks: every cell runs, top to bottom, and what it asserts holds; no output is committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return found


def test_the_readme_lists_them() -> None:
    assert len(NOTEBOOKS) == 5
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{notebook.name}`" in text for notebook in NOTEBOOKS)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "notebook"}
    code = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    assert code
    for number, cell in enumerate(code, 1):
        exec(compile("".join(cell["source"]), f"{notebook.name}, code cell {number}", "exec"), scope)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_committed(notebook: Path) -> None:
    for cell in cells(notebook):
        assert not cell.get("outputs"), notebook.name
        assert cell.get("execution_count") is None, notebook.name
