"""Where compilers are looked for, in what order, and what is said when there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuseline.native.compilers import (
    Compiler,
    _nvcc_candidates,
    find_cxx,
    find_nvcc,
    toolkit_library_flags,
    toolkit_version,
)

MakeTool = Callable[[Path, str], Path]
NVCC = "echo nvcc: NVIDIA; echo Cuda compilation tools, release 13.1, V13.1.9"


def test_takes_gxx_on_path_before_clang(bare: Path, make_tool: MakeTool) -> None:
    make_tool(bare / "clang++", "echo clang version 17")
    assert find_cxx().compiler.is_clang
    make_tool(bare / "g++", "echo 'g++ (X) 12.2.0'")
    found = find_cxx().compiler
    assert (found.path, found.version, found.found_by) == (str(bare / "g++"), "g++ (X) 12.2.0", "g++ on PATH")


def test_says_where_it_looked(bare: Path) -> None:
    search = find_cxx()
    assert search.compiler is None
    assert search.reason == (
        "no C++ compiler was found "
        "(g++ on PATH: not there; c++ on PATH: not there; clang++ on PATH: not there)"
    )
    assert "apt-get install g++" in search.mend


def test_the_named_compiler_is_taken_or_nothing(
    bare: Path, make_tool: MakeTool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_tool(bare / "g++", "echo g++ 12")
    mine = make_tool(tmp_path / "mine", "echo mine 1.0")
    wrapper = make_tool(tmp_path / "ccache", 'exec "$@"')
    monkeypatch.setenv("CXX", f"{wrapper} {mine}")
    assert find_cxx().compiler.command == (str(wrapper), str(mine))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    search = find_cxx()
    assert search.compiler is None
    assert search.tried == ("$CXX=/nowhere/g++: not there",)


def test_a_compiler_that_does_not_run_is_passed_over(bare: Path, make_tool: MakeTool) -> None:
    make_tool(bare / "g++", "exit 1")
    make_tool(bare / "c++", "echo c++ 11")
    search = find_cxx()
    assert search.compiler.version == "c++ 11"
    assert search.tried == ("g++ on PATH: does not run",)


def test_nvcc_is_looked_for_in_the_named_toolkit_first(
    bare: Path, make_tool: MakeTool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_tool(bare / "nvcc", NVCC.replace("13.1", "12.8"))
    make_tool(tmp_path / "toolkit" / "bin" / "nvcc", NVCC)
    assert toolkit_version(find_nvcc().compiler) == (12, 8)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert toolkit_version(find_nvcc().compiler) == (13, 1)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-compiler-in-here"))
    search = find_nvcc()
    assert toolkit_version(search.compiler) == (12, 8)
    assert search.tried == (f"$CUDA_HOME={tmp_path / 'no-compiler-in-here'}: not there",)


def test_nvcc_is_found_in_a_wheel(
    bare: Path, make_tool: MakeTool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = tmp_path / "site-packages"
    tool = make_tool(site / "nvidia" / "cu13" / "bin" / "nvcc", NVCC)
    (site / "nvidia" / "cu13" / "lib").mkdir()
    (site / "nvidia" / "cu13" / "lib" / "libcudart_static.a").touch()
    for name in [n for n in sys.modules if n == "nvidia" or n.startswith("nvidia.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(site)])
    wheels = [c for c in _nvcc_candidates() if "wheel" in c.found_by]
    assert [c.command for c in wheels] == [(str(tool),)]
    found = Compiler((str(tool),), "release 13.1", "the wheel")
    assert toolkit_library_flags(found) == (f"-L{site / 'nvidia' / 'cu13' / 'lib'}",)
