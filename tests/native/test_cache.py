"""Keys by content, one maker at a time, never half a file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fuseline.errors import InputError
from fuseline.native.cache import cache_dir, content_key, make_once, make_sealed


def test_key_is_of_texts_names_and_contents(tmp_path: Path) -> None:
    file = tmp_path / "a.cu"
    file.write_text("one")
    key = content_key(("-O3",), (file,))
    assert content_key(("-O3",), (file,)) == key
    moved = tmp_path / "elsewhere" / "a.cu"
    moved.parent.mkdir()
    moved.write_text("one")
    assert content_key(("-O3",), (moved,)) == key
    others = [content_key(("-O2",), (file,)), content_key(("-O", "3"), (file,)), content_key(("-O3",), ())]
    renamed = tmp_path / "b.cu"
    renamed.write_text("one")
    others.append(content_key(("-O3",), (renamed,)))
    file.write_text("two")
    others.append(content_key(("-O3",), (file,)))
    assert len({key, *others}) == 6


def test_folder_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("FUSELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fuseline"


def test_a_failed_maker_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        make_once(path, fail)
    assert [p.name for p in path.parent.iterdir() if not p.name.endswith(".lock")] == []
    assert make_once(path, lambda temporary: _write(temporary, "whole")).read_text() == "whole"


def test_is_made_once_by_many_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_make_slowly, args=(tmp_path,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(list(tmp_path.glob("maker-*"))) == 1


def test_a_second_thread_waits_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    started, waited = threading.Event(), threading.Event()

    def slow(temporary: Path) -> None:
        started.set()
        assert waited.wait(30)
        temporary.write_text("first")

    first = threading.Thread(target=make_once, args=(path, slow))
    first.start()
    assert started.wait(30)
    made = make_once(path, lambda temporary: _write(temporary, "second"), waited.set)
    first.join()
    assert made.read_text() == "first"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cannot be written .* Name another in \$FUSELINE_CACHE"):
        make_once(cache_dir() / "lib" / "x", lambda temporary: _write(temporary, ""))


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _make_slowly(folder: Path) -> None:
    def make(temporary: Path) -> None:
        (folder / f"maker-{multiprocessing.current_process().pid}").touch()
        time.sleep(0.3)
        temporary.write_text("made")

    assert make_once(folder / "file", make).read_text() == "made"


def _killed_maker(path: Path) -> None:
    def make(temporary: Path) -> None:
        temporary.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    make_once(path, make)


def test_what_a_killed_maker_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """Its own room, and that of another file in a folder beside it."""
    context = multiprocessing.get_context("spawn")
    places = tmp_path / "one" / "file", tmp_path / "two" / "file"
    for place in places:
        worker = context.Process(target=_killed_maker, args=(place,))
        worker.start()
        worker.join()
        assert worker.exitcode == -signal.SIGKILL
        assert not place.exists()
    assert make_once(places[1], lambda temporary: _write(temporary, "whole")).read_text() == "whole"
    assert not list(tmp_path.rglob("*.building"))


def test_a_room_in_use_is_left_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"

    def make(temporary: Path) -> None:
        make_once(other, lambda inner: _write(inner, "other"))
        _write(temporary, "whole")

    assert make_once(path, make).read_text() == "whole"
    assert other.read_text() == "other"


def test_an_empty_file_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="empty"):
        make_sealed(tmp_path / "file", lambda temporary: _write(temporary, ""))
    assert not (tmp_path / "file").exists()
