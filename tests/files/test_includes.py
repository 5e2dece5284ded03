"""The headers a source reads, found through one another; libraries' headers left out."""

from __future__ import annotations

from pathlib import Path

from fuseline.files.includes import included_headers
from fuseline.native.recipes import INCLUDE, KERNELS, TORCH


def test_headers_are_found_through_one_another(tmp_path: Path) -> None:
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "first.h").write_text('#pragma once\n#include "second.h"\n#include <vector>\n')
    (folder / "second.h").write_text('#  include "first.h"\n// #include "unread.h"\n')
    (folder / "unread.h").write_text("")
    (tmp_path / "beside.h").write_text("")
    source = tmp_path / "source.cpp"
    source.write_text('#include "beside.h"\n#include "first.h"\n#include "of_a_library.h"\n')
    assert included_headers(source, (folder,)) == tuple(
        sorted((tmp_path / "beside.h", folder / "first.h", folder / "second.h"))
    )


def test_a_header_that_changes_is_read_again(tmp_path: Path) -> None:
    source, header = tmp_path / "source.cpp", tmp_path / "beside.h"
    source.write_text('#include "beside.h"\n')
    header.write_text("")
    assert included_headers(source, ()) == (header,)
    (tmp_path / "later.h").write_text("")
    header.write_text('#include "later.h"\n')
    assert included_headers(source, ()) == (header, tmp_path / "later.h")


def test_every_header_of_the_kernels_api_is_read() -> None:
    folders = (TORCH, KERNELS, INCLUDE)
    read = {header for source in TORCH.rglob("*.cpp") for header in included_headers(source, folders)}
    assert {path.resolve() for path in KERNELS.glob("*.h")} <= read
