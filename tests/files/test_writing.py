from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuseline.files.writing import remove_partial, write_atomically


def test_the_new_file_takes_the_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"one"))
    write_atomically(path, lambda file: file.write(b"two"))
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def half(file: object) -> None:
        file.write(b"ha")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, half)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_crash_before_the_rename_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "replace", lambda *_: os._exit(9))  # dies as SIGKILL would
        write_atomically(path, lambda file: file.write(b"new"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert path.read_bytes() == b"old"
    assert len(os.listdir(tmp_path)) == 2
    remove_partial(tmp_path)
    assert os.listdir(tmp_path) == ["file"]
