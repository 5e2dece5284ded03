"""Threads against the cores there are."""

from __future__ import annotations

from fuseline.doctor import threads


def test_more_threads_than_cores_is_told_with_the_command():
    check = threads._threads(16, 2.0)
    assert check.state == "warn"
    assert check.mend == "export OMP_NUM_THREADS=2"
    assert threads._threads(2, 2.0).state == "ok"
