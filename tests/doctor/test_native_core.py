"""Compilers, libraries, cache and disk: every state they can be in."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

from fuseline import native
from fuseline.doctor import native_core
from fuseline.native import Compiler, LibraryStatus, NativeError, Search, Status

FOUND = Search("C++ compiler", Compiler(("/usr/bin/g++",), "g++ 12.2", "g++ on PATH"), (), "")
MISSING = Search("nvcc", None, ("nvcc on PATH: not there",), "pip install 'fuseline[nvcc]'")


@pytest.fixture
def core_checks(monkeypatch, tmp_path):
    """Makes a machine and returns its checks by name."""

    def make(*, gpu=False, torch_library=None, load=lambda: True, cache=tmp_path):
        library = torch_library or LibraryStatus(
            "fuseline_torch", True, tmp_path / "libfuseline_torch.so", ""
        )
        kernels = LibraryStatus("fuseline_kernels", reason="no nvcc was found.", mend="pip install nvcc")
        compilers = {"cxx": FOUND, "nvcc": MISSING}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(native, "compilers", lambda: compilers)
        monkeypatch.setattr(native, "load", load)
        monkeypatch.setattr(native, "status", lambda: Status(library, kernels, compilers))
        monkeypatch.setattr(native, "cache_dir", lambda: cache)
        return {check.name: check for check in native_core.checks()}

    return make


def test_what_was_found_is_named_with_its_place(core_checks, tmp_path):
    checks = core_checks()
    assert checks["C++"].state == "ok"
    assert "/usr/bin/g++" in checks["C++"].found
    assert checks["operations"].state == "ok"
    assert str(tmp_path / "libfuseline_torch.so") in checks["operations"].found


def test_without_a_gpu_nvcc_and_kernels_are_not_missed(core_checks):
    checks = core_checks(gpu=False)
    assert (checks["nvcc"].state, checks["kernels"].state) == ("absent", "absent")


def test_with_a_gpu_they_are_and_the_reason_and_the_mend_are_told(core_checks):
    checks = core_checks(gpu=True)
    assert (checks["nvcc"].state, checks["kernels"].state) == ("warn", "warn")
    assert checks["nvcc"].mend == "pip install 'fuseline[nvcc]'"
    assert "no nvcc was found" in checks["kernels"].found
    assert checks["kernels"].mend == "pip install nvcc"


def test_a_library_that_is_not_loaded_always_has_a_mend(core_checks):
    check = core_checks(torch_library=LibraryStatus("fuseline_torch", reason="it would not."))["operations"]
    assert check.state == "warn"
    assert check.mend == "fuseline build"


def test_strict_mode_makes_a_fallback_broken(core_checks):
    def strict():
        raise NativeError("FUSELINE_STRICT is set, and there is no compiler")

    check = core_checks(load=strict)["FUSELINE_STRICT"]
    assert check.state == "bad"
    assert check.mend


def test_the_cache_is_counted(core_checks, tmp_path):
    folder = tmp_path / "cache"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "a.so").write_bytes(bytes(3 * 2**20))
    assert "1 files, 3.0 MiB" in core_checks(cache=folder)["cache"].found


def test_a_cache_that_is_not_there_yet_is_well(core_checks, tmp_path):
    check = core_checks(cache=tmp_path / "not" / "yet")["cache"]
    assert check.state == "ok"
    assert not (tmp_path / "not").exists()


def test_a_cache_that_cannot_be_written_is_told(core_checks, monkeypatch, tmp_path):
    monkeypatch.setattr(native_core, "_is_writable", lambda folder: False)
    check = core_checks(cache=tmp_path)["cache"]
    assert check.state == "warn"
    assert "FUSELINE_CACHE" in check.mend


def test_writing_is_tried_and_leaves_nothing(tmp_path):
    assert native_core._is_writable(tmp_path)
    assert not list(tmp_path.iterdir())
    assert not native_core._is_writable(tmp_path / "missing")


@pytest.mark.parametrize("free, state", [(100 * 2**20, "warn"), (50 * 2**30, "ok")])
def test_little_disk_space_is_told(core_checks, monkeypatch, free, state):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    assert core_checks()["disk"].state == state


def test_what_is_not_built_is_named_and_nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: pytest.fail("loading builds"))
    checks = {check.name: check for check in native_core.checks(["fuseline_torch"])}
    assert checks["fuseline_torch"].state == "absent"
    assert "doctor --build" in checks["fuseline_torch"].mend
    assert "operations" not in checks
