"""Objects cached by content, libraries by their objects, and a compiler's complaint passed on."""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fuseline.errors import InputError
from fuseline.native.build import BuildError, Recipe, Unit, build
from fuseline.native.compilers import Compiler, find_cxx, find_nvcc
from fuseline.native.recipes import gencode, kernels_recipe, torch_recipe
from fuseline.native.seals import is_whole, seal_path

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
    assert "2 parts to compile" in capfd.readouterr().err
    before = objects(tmp_path)
    assert build(recipe) == first
    assert capfd.readouterr().err == ""
    (tmp_path / "sizes.h").write_text("#define SIZE 5\n")
    second = build(recipe)
    assert second != first
    assert (ctypes.CDLL(str(second)).a(), ctypes.CDLL(str(second)).b()) == (5, 4)
    assert "1 part to compile" in capfd.readouterr().err
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


def test_hopper_has_no_machine_code_of_kernels_that_it_does_not_run() -> None:
    source = Path("small_not_sm90.cu")
    a100, later = "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=compute_90"
    assert gencode(source, (8,)) == (a100,)
    assert gencode(source, (9,)) == gencode(source, (10,)) == (later,)
    assert gencode(source) == gencode(source, (8, 9)) == (a100, later)


@pytest.mark.parametrize("majors, cores", [((), 2), ((9,), 1), ((8, 9), 2)])
def test_as_many_sources_at_once_as_cores_allow(majors: tuple[int, ...], cores: int) -> None:
    nvcc, cxx = Compiler(("nvcc",), "release 13.0", ""), Compiler(("g++",), "g++ 12", "")
    assert max(unit.cores for unit in kernels_recipe(nvcc, cxx, majors).units) == cores


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}")
@needs_cxx
def test_kernels_build_and_export_their_interface() -> None:
    """A small part of the library; `test_kernels_compile` compiles every source."""
    whole = kernels_recipe(find_nvcc().compiler, CXX)
    part = ("errors", "tuning", "dropout")
    units = tuple(unit for unit in whole.units if unit.source.stem in part)
    assert len(units) == len(part)
    library = ctypes.CDLL(str(build(replace(whole, name="fuseline_dropout", units=units))))
    assert library.fuseline_kernels_abi_version() >= 1
    for name in ("dropout", "relu_dropout_backward", "error_string"):
        assert hasattr(library, f"fuseline_{name}")


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "half":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "flipped":
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif kind == "another":
        path.write_bytes(Path("/proc/self/exe").read_bytes())
    else:
        seal_path(path).unlink()


@needs_cxx
@pytest.mark.parametrize("kind", ["empty", "half", "flipped", "another", "unsealed"])
def test_a_damaged_library_is_never_loaded_but_built_again(
    recipe: Recipe, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = build(recipe)
    content = path.read_bytes()
    capfd.readouterr()
    damage(path, kind)
    assert not is_whole(path)
    assert build(recipe) == path
    assert "to compile" not in capfd.readouterr().err  # linked anew, from whole objects
    assert is_whole(path)
    assert path.read_bytes() == content
    assert ctypes.CDLL(str(path)).a() == 3


@needs_cxx
def test_a_torn_object_is_compiled_again(
    recipe: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = build(recipe)
    damage(next((tmp_path / "cache" / "obj").glob("a-*.o")), "half")
    damage(path, "empty")
    capfd.readouterr()
    assert ctypes.CDLL(str(build(recipe))).a() == 3
    assert "1 part to compile" in capfd.readouterr().err


@needs_cxx
def test_compilers_keep_their_own_files_in_the_room(recipe: Recipe, tmp_path: Path) -> None:
    spy = tmp_path / "g++"
    spy.write_text(f'#!/bin/sh\necho "$TMPDIR" >> {tmp_path}/rooms\nexec {CXX.path} "$@"\n')
    spy.chmod(0o755)
    compiler = Compiler((str(spy),), CXX.version, "")
    build(replace(recipe, units=tuple(replace(u, compiler=compiler) for u in recipe.units)))
    rooms = (tmp_path / "rooms").read_text().split()
    assert len(rooms) == 2
    assert all(room.endswith(".building") and not Path(room).exists() for room in rooms)


@needs_cxx
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_full_disk_is_one_line(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        monkeypatch.setenv("FUSELINE_CACHE", str(disk))
        with pytest.raises(InputError) as caught:
            build(recipe)
        assert "full" in str(caught.value) or "No space" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not [*disk.rglob("*.so"), *disk.rglob("*.building")]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
