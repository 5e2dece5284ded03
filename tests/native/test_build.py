"""Objects cached by content, libraries by their objects, and a compiler's complaint passed on."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest

from fuseline.native.build import BuildError, Recipe, Unit, build
from fuseline.native.compilers import Compiler, find_cxx, find_nvcc
from fuseline.native.recipes import gencode, kernels_recipe, torch_recipe

CXX = find_cxx().compiler
needs_cxx = pytest.mark.skipif(CXX is None, reason=f"needs a C++ compiler: {find_cxx().reason}")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A library of two functions in two files."""
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sizes.h").write_text("#define SIZE 3\n")
    (tmp_path / "a.cpp").write_text('#include "sizes.h"\nextern "C" int a() { return SIZE; }\n')
    (tmp_path / "b.cpp").write_text('extern "C" int b() { return 4; }\n')
    flags = ("-fPIC", f"-I{tmp_path}")
    header = (tmp_path / "sizes.h",)
    units = (
        Unit(tmp_path / "a.cpp", CXX, flags, header, (), "a.cpp"),
        Unit(tmp_path / "b.cpp", CXX, flags, (), (), "b.cpp"),
    )
    return Recipe("pair", units, CXX, ("-shared",))


def objects(tmp_path: Path) -> set[str]:
    return {p.name for p in (tmp_path / "cache" / "obj").glob("*.o")}


@needs_cxx
def test_one_edit_recompiles_one_file(
    recipe: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = build(recipe)
    assert ctypes.CDLL(str(first)).a() == 3
    assert "2 files to compile" in capfd.readouterr().err
    before = objects(tmp_path)
    assert build(recipe) == first
    assert capfd.readouterr().err == ""
    (tmp_path / "sizes.h").write_text("#define SIZE 5\n")
    second = build(recipe)
    assert second != first
    assert (ctypes.CDLL(str(second)).a(), ctypes.CDLL(str(second)).b()) == (5, 4)
    assert "1 file to compile" in capfd.readouterr().err
    assert {name.split("-")[0] for name in objects(tmp_path) - before} == {"a"}


@needs_cxx
def test_key_is_of_flags_and_versions_not_of_places(recipe: Recipe, tmp_path: Path) -> None:
    unit = recipe.units[0]
    key = unit.key()
    assert replace(unit, flags=("-fPIC", "-I/somewhere/else")).key() == key
    assert replace(unit, flags=(*unit.flags, "-O2")).key() != key
    assert replace(unit, identity=("torch 2.11",)).key() != key
    assert replace(unit, compiler=Compiler(unit.compiler.command, "g++ 99", "")).key() != key


@needs_cxx
def test_a_compilers_complaint_is_passed_on(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "b.cpp").write_text("int b() { return nonsense; }\n")
    with pytest.raises(BuildError, match=r"(?s)b.cpp did not compile .*g\+\+.*nonsense.*fuseline doctor"):
        build(recipe)
    assert not list((tmp_path / "cache" / "lib").glob("*/*.so"))


def test_the_kernels_key_knows_nothing_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc, cxx = Compiler(("nvcc",), "release 13.0", ""), Compiler(("g++",), "g++ 12", "")
    kernels, torch_library = kernels_recipe(nvcc, cxx).key(), torch_recipe(cxx).key()
    monkeypatch.setattr("torch.__version__", "2.99.0")
    assert kernels_recipe(nvcc, cxx).key() == kernels
    assert torch_recipe(cxx).key() != torch_library


def test_a_toolkit_from_a_wheel_builds_the_same_library_anywhere() -> None:
    cxx = Compiler(("g++",), "g++ 12", "")
    here, there = Compiler(("/a/nvcc",), "release 13.0", ""), Compiler(("/b/nvcc",), "release 13.0", "")
    assert kernels_recipe(here, cxx).key() == kernels_recipe(there, cxx).key()


def test_kernels_are_compiled_for_the_machines_named() -> None:
    source = Path("softmax_forward.cu")
    assert gencode(source, (9,)) == ("-gencode=arch=compute_90,code=sm_90",)
    assert gencode(source, (8, 9)) == gencode(source)[:2]
    assert gencode(source, (12,)) == ("-gencode=arch=compute_90,code=compute_90",)
    assert gencode(Path("small_sm90a.cu"), (8,)) == ("-gencode=arch=compute_90a,code=sm_90a",)


@pytest.mark.parametrize("majors, cores", [((), 2), ((9,), 1), ((8, 9), 2)])
def test_as_many_sources_at_once_as_cores_allow(majors: tuple[int, ...], cores: int) -> None:
    nvcc, cxx = Compiler(("nvcc",), "release 13.0", ""), Compiler(("g++",), "g++ 12", "")
    assert max(unit.cores for unit in kernels_recipe(nvcc, cxx, majors).units) == cores


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}")
@needs_cxx
def test_kernels_build_and_export_their_interface() -> None:
    """A part of the library, which takes two cores a minute; `test_kernels_compile` compiles every source."""
    whole = kernels_recipe(find_nvcc().compiler, CXX)
    part = ("errors", "tuning", "softmax_forward", "softmax_masked", "softmax_backward")
    units = tuple(unit for unit in whole.units if unit.source.stem in part)
    library = ctypes.CDLL(str(build(replace(whole, name="fuseline_softmax", units=units))))
    assert library.fuseline_kernels_abi_version() >= 1
    for name in ("softmax_forward", "softmax_backward", "error_string"):
        assert hasattr(library, f"fuseline_{name}")
