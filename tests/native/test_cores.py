"""Cores and memory, and how many compilers they take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuseline.native import cores


@pytest.mark.parametrize("quota, count", [("max 100000", 8), ("250000 100000", 2.5), ("1600000 100000", 8)])
def test_a_containers_quota_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, count: float
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(f"{quota}\n")
    monkeypatch.setattr(cores, "CPU_MAX", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert cores.available_cores() == count


def test_without_a_quota_the_bound_cores_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores, "CPU_MAX", tmp_path / "missing")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert cores.available_cores() == 3


@pytest.mark.parametrize("gib, compilers", [(64, 8), (5, 3), (1, 1)])
def test_memory_limits_the_compilers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gib: int, compilers: int
) -> None:
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: 1 kB\nMemAvailable: {gib * 2**20} kB\n")
    monkeypatch.setattr(cores, "MEMINFO", file)
    monkeypatch.setattr(cores, "available_cores", lambda: 8.0)
    assert cores.compilers_at_once() == compilers


def test_where_memory_is_not_told_the_cores_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores, "MEMINFO", tmp_path / "missing")
    monkeypatch.setattr(cores, "available_cores", lambda: 0.5)
    assert cores.compilers_at_once() == 1
