"""Tuning's times are kept as they come: a run that was stopped goes on, and what is missing is told."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fuseline.native.layouts import TABLE, Layout, Line, Table, read

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
FAST, SLOW = Layout(1, 128), Layout(4, 128)
FAMILY = "softmax_forward"


class Stand:
    """In the place of a GPU: counts what is measured, and is stopped after `patience` points."""

    def __init__(self, patience: int = 99) -> None:
        self.patience = patience
        self.seen: list[tuple[str, int, int]] = []

    def measure(self, kernels: object, name: str, size: int, n: int, repeats: int) -> dict[Layout, float]:
        if len(self.seen) == self.patience:
            raise KeyboardInterrupt
        self.seen.append((name, size, n))
        return {SLOW: 2.0, FAST: 1.0}


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("tune_rows")
    monkeypatch.setattr(module, "TABLE", Path(shutil.copy(TABLE, tmp_path / TABLE.name)))
    monkeypatch.setattr(module.native, "load", lambda: None)
    monkeypatch.setattr(module, "open_kernels", lambda: None)
    monkeypatch.setattr(module, "copy_bandwidth_gbs", lambda device: 1000.0)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda device: "Stand")
    return module


def to_4096(table: Table, size: int) -> list[Line]:
    """A family's lines where all rows to 4,096 are to be laid out as FAST."""
    return [(4096, FAST), *(line for line in table[FAMILY, size] if line[0] > 4096)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "times.jsonl"


def run(tune: ModuleType, monkeypatch: pytest.MonkeyPatch, stand: Stand, **options: Any) -> int:
    monkeypatch.setattr(tune, "measure", stand.measure)
    return tune.main(tune.Options(**{"families": (FAMILY,), "lengths": (8, 4096), **options}))


def test_a_stopped_run_goes_on(
    tune: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tune, monkeypatch, Stand(patience=3), out=out, write=True) == 130
    assert f"--resume goes on with {out}" in capsys.readouterr().err
    assert [tune.point(json.loads(line)) for line in out.read_text().splitlines()] == [
        (FAMILY, 2, 8),
        (FAMILY, 2, 4096),
        (FAMILY, 4, 8),
    ]
    assert tune.TABLE.read_text() == TABLE.read_text()
    assert run(tune, monkeypatch, Stand(), out=out) == 2
    assert "holds times already: go on with --resume" in capsys.readouterr().err
    with out.open("a") as file:
        file.write('{"family": "softmax_forw')  # killed as it wrote
    rest = Stand()
    assert run(tune, monkeypatch, rest, out=out, resume=True, write=True) == 0
    assert rest.seen == [(FAMILY, 4, 4096)]
    assert len(tune.kept(out)) == out.read_text().count("\n") == 4
    assert "keeps its lines" not in capsys.readouterr().out
    table, before = read(tune.TABLE.read_text()), read(TABLE.read_text())
    assert table == {**before, (FAMILY, 2): to_4096(before, 2), (FAMILY, 4): to_4096(before, 4)}
    assert "from times on an Stand;" in tune.TABLE.read_text()


def test_partial_times_write_what_is_whole(
    tune: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tune, monkeypatch, Stand(patience=3), out=out) == 130
    families = (FAMILY, "cross_entropy")
    assert run(tune, monkeypatch, Stand(patience=0), times=out, families=families, write=True) == 0
    told = capsys.readouterr().out
    assert f"{FAMILY} of 2 bytes" not in told
    assert f"{FAMILY} of 4 bytes keeps its lines: there are no times of 4096" in told
    assert "cross_entropy of 2 bytes keeps its lines: there are no times of any length" in told
    before = read(TABLE.read_text())
    assert read(tune.TABLE.read_text()) == {**before, (FAMILY, 2): to_4096(before, 2)}


def test_lines_for_lengths_that_were_not_measured_stay(
    tune: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path
) -> None:
    assert run(tune, monkeypatch, Stand(), out=out, lengths=(20000, 40001), write=True) == 0
    before, table = read(TABLE.read_text()), read(tune.TABLE.read_text())
    for size in (2, 4):
        found, was = table[FAMILY, size], before[FAMILY, size]
        layout = next(layout for longest, layout in was if longest >= 19999)
        shorter = [line for line in was if line[0] < 19999]
        assert found == [
            *shorter,
            (19999, layout),
            (40001, FAST),
            *(line for line in was if line[0] > 40001),
        ]


def test_times_of_another_device_are_not_gone_on_with(
    tune: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tune, monkeypatch, Stand(), out=out) == 0
    monkeypatch.setattr(tune.torch.cuda, "get_device_name", lambda device: "Other")
    before = out.read_bytes()
    assert run(tune, monkeypatch, Stand(patience=0), out=out, resume=True) == 2
    assert "has times on Stand; this is Other" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert run(tune, monkeypatch, Stand(patience=0), resume=True) == 2
    assert "name it" in capsys.readouterr().err
