from __future__ import annotations

import math
from pathlib import Path

import pytest

from fuseline.errors import InputError
from fuseline.training.metrics import JsonLines, check_installed, cut_back, read_metrics


def entries(*steps: int) -> list[dict[str, object]]:
    return [{"kind": "step", "step": step, "loss": 1.0 / step} for step in steps]


def test_entries_come_back_as_they_were_written(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "metrics.jsonl")
    writer.write(entries(1, 2))
    writer.write([])
    writer.write(entries(3))
    assert read_metrics(writer.path) == entries(1, 2, 3)


def test_infinity_is_written_as_null(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "metrics.jsonl")
    writer.write([{"kind": "step", "step": 1, "loss": math.inf}])
    assert read_metrics(writer.path)[0]["loss"] is None


def test_entries_after_the_checkpoint_go_and_a_torn_line_with_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(path).write(entries(1, 2, 3, 4))
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "st')
    cut_back(path, 2)
    assert read_metrics(path) == entries(1, 2)
    cut_back(path, 2)
    assert read_metrics(path) == entries(1, 2)
    path.write_bytes(b'{"kind": "step", "st')  # killed in its very first line
    cut_back(path, 2)
    assert read_metrics(path) == []
    cut_back(tmp_path / "none.jsonl", 2)
    assert not (tmp_path / "none.jsonl").exists()


def test_an_extra_that_is_missing_is_named_with_its_mend() -> None:
    with pytest.raises(InputError, match=r"pip install 'fuseline\[no_such_package\]'"):
        check_installed(["json", "no_such_package"])
