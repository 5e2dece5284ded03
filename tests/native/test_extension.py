"""`build_extension`: what it builds, what it keeps, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuseline import native
from fuseline.errors import InputError
from fuseline.native import build_extension
from fuseline.native.compilers import find_cxx, find_nvcc

needs_cxx = pytest.mark.skipif(
    find_cxx().compiler is None, reason=f"needs a C++ compiler: {find_cxx().reason}"
)
needs_nvcc = pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}")
ADD = """
#include <torch/library.h>
static double add_one(double x) { return x + ONE; }
TORCH_LIBRARY(fuseline_test_add, m) { m.def("add_one", add_one); }
"""
SILENT = "int nothing() { return 0; }\n"


@needs_cxx
def test_source_text_becomes_operators(capfd: pytest.CaptureFixture[str]) -> None:
    operators = build_extension("fuseline_test_add", cpp_sources=[ADD], extra_cflags=["-DONE=1.0"])
    assert operators.add_one(2.0) == 3.0
    capfd.readouterr()
    again = build_extension("fuseline_test_add", cpp_sources=[ADD], extra_cflags=["-DONE=1.0"])
    assert again is operators
    assert capfd.readouterr().err == ""
    with pytest.raises(InputError, match="loaded in this process from other sources"):
        build_extension("fuseline_test_add", cpp_sources=[ADD], extra_cflags=["-DONE=2.0"])


@needs_cxx
def test_a_source_that_registers_nothing_is_told(tmp_path: Path) -> None:
    source = tmp_path / "silent.cpp"
    source.write_text(SILENT)
    with pytest.raises(
        InputError, match=r"no operator under that name. They need TORCH_LIBRARY\(fuseline_test_s"
    ):
        build_extension("fuseline_test_silent", cpp_sources=[source])


@needs_cxx
def test_a_function_that_is_nowhere_is_told() -> None:
    source = "void nowhere();\nstruct Calls { Calls() { nowhere(); } } calls;\n"
    with pytest.raises(InputError, match=r"does not load: .*nowhere.*extra_ldflags"):
        build_extension("fuseline_test_nowhere", cpp_sources=[source])


@needs_cxx
def test_a_compilers_complaint_is_passed_on() -> None:
    with pytest.raises(native.BuildError, match=r"(?s)fuseline_test_bad.cpp did not compile.*nonsense"):
        build_extension("fuseline_test_bad", cpp_sources=["int x = nonsense;\n"])


@pytest.mark.parametrize("name", ["", "1st", "a-b", "a b", "../up", "größe"])
def test_a_name_is_an_identifier(name: str) -> None:
    with pytest.raises(InputError, match="cannot name an extension"):
        build_extension(name, cpp_sources=[SILENT])


@pytest.mark.parametrize("name", ["aten", "fuseline", "prims"])
def test_a_namespace_in_use_is_not_taken(name: str) -> None:
    with pytest.raises(InputError, match="namespace of torch's or ours"):
        build_extension(name, cpp_sources=[SILENT])


def test_no_sources_and_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="was given no sources"):
        build_extension("fuseline_test_none")
    with pytest.raises(InputError, match=r"there is no file .*missing.cpp"):
        build_extension("fuseline_test_none", cpp_sources=[tmp_path / "missing.cpp"])


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(InputError, match=r"cannot compile: no C\+\+ compiler .*apt-get install g\+\+"):
        build_extension("fuseline_test_none", cpp_sources=[SILENT])
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    if find_cxx().compiler is not None:
        with pytest.raises(InputError, match=r"cannot compile: no nvcc .*fuseline\[nvcc\]"):
            build_extension("fuseline_test_none", cpp_sources=[SILENT], cuda_sources=[SILENT])


@pytest.mark.slow
@needs_cxx
@needs_nvcc
def test_cuda_sources_are_linked_in() -> None:
    cuda = """
    #include <cuda_runtime.h>
    extern "C" int answer() { return cudaRuntimeGetVersion(nullptr) ? 42 : 0; }
    """
    cpp = """
    #include <torch/library.h>
    #ifndef FUSELINE_WITH_CUDA
    #error "the macro is missing"
    #endif
    extern "C" int answer();
    static int64_t ask() { return answer(); }
    TORCH_LIBRARY(fuseline_test_cuda, m) { m.def("ask", ask); }
    """
    operators = build_extension("fuseline_test_cuda", cpp_sources=[cpp], cuda_sources=[cuda])
    assert operators.ask() == 42
    assert torch.ops.fuseline_test_cuda.ask() == 42
