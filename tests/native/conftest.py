"""Pretend compilers: scripts that answer like the real ones."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

MakeTool = Callable[[Path, str], Path]


def make_tool(path: Path, answer: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(name="make_tool")
def _make_tool() -> MakeTool:
    """Writes an executable script."""
    return make_tool


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that names no compiler and has none on PATH. Returns the one folder on PATH."""
    for variable in ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder
