"""Threads against the cores there are."""

from __future__ import annotations

import os

import pytest

from fuseline.doctor import threads


@pytest.mark.parametrize("quota, cores", [("max 100000", 8), ("250000 100000", 2.5), ("1600000 100000", 8)])
def test_a_containers_quota_counts(monkeypatch, tmp_path, quota, cores):
    file = tmp_path / "cpu.max"
    file.write_text(f"{quota}\n")
    monkeypatch.setattr(threads, "CPU_MAX", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert threads.available_cores() == cores


def test_without_a_quota_the_bound_cores_count(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "CPU_MAX", tmp_path / "missing")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert threads.available_cores() == 3


def test_more_threads_than_cores_is_told_with_the_command():
    check = threads._threads(16, 2.0)
    assert check.state == "warn"
    assert check.mend == "export OMP_NUM_THREADS=2"
    assert threads._threads(2, 2.0).state == "ok"
