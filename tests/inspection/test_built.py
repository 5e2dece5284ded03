"""Which library is read, and what is said where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuseline.errors import InputError
from fuseline.inspection import built, find_built
from fuseline.native.seals import seal


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FUSELINE_KERNELS_LIBRARY", raising=False)
    monkeypatch.setattr(built, "PREBUILT", tmp_path / "no-wheel")
    return tmp_path / "cache"


def _built(cache: Path, key: str, at: int) -> Path:
    path = cache / "lib" / f"fuseline_kernels-{key}" / "libfuseline_kernels.so"
    path.parent.mkdir(parents=True)
    path.write_text(key)
    seal(path)
    os.utime(path, (at, at))
    return path


def test_says_what_to_type_where_nothing_is_built(cache: Path) -> None:
    with pytest.raises(
        InputError, match=r"No kernel library is built.*fuseline build --kernels-only --arch 9\.0"
    ):
        find_built()


def test_the_newest_of_other_sources_with_a_word_of_it(cache: Path) -> None:
    _built(cache, "old", 100)
    newest = _built(cache, "new", 200)
    _built(cache, "cut", 300).write_text("not as it was sealed")
    found = find_built()
    assert found.path == newest
    assert "other sources" in found.remark


def test_that_of_these_sources_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = _built(cache, "ours", 100)
    _built(cache, "newer", 200)
    monkeypatch.setattr(built, "_of_these_sources", lambda: [cache / "nowhere", ours])
    assert find_built() == built.Built(ours)


def test_a_named_file_comes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _built(cache, "cached", 100)
    named = tmp_path / "mine.so"
    named.touch()
    assert find_built(named).path == named
    monkeypatch.setenv("FUSELINE_KERNELS_LIBRARY", str(named))
    assert find_built().path == named
    with pytest.raises(InputError, match="There is no file"):
        find_built(tmp_path / "typo.so")
