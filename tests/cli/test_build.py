"""`fuseline build`."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from fuseline.cli.main import run
from fuseline.native.compilers import find_cxx, find_nvcc

needs_cxx = pytest.mark.skipif(
    find_cxx().compiler is None, reason=f"needs a C++ compiler: {find_cxx().reason}"
)


@needs_cxx
def test_says_what_it_would_build(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "cache"))
    assert run(["build", "--torch-only", "--dry-run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) - {"fuseline_direct"} == {"fuseline_torch"}  # that where Python's headers are
    assert answer["fuseline_torch"].startswith(str(tmp_path / "cache" / "lib"))
    assert not (tmp_path / "cache").exists()


def test_refuses_what_excludes_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "--torch-only", "--kernels-only"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_names_the_missing_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert run(["build"]) == 2
    assert "Nothing was built: no C++ compiler was found ($CXX=/nowhere/g++" in capsys.readouterr().err


@needs_cxx
def test_wheel_carries_the_library(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["build", "--wheel", "--torch-only", "--json", "--out", str(tmp_path)]) == 0
    wheel = Path(json.loads(capsys.readouterr().out)["wheel"])
    assert wheel.name.endswith(("linux_x86_64.whl", "linux_aarch64.whl"))
    assert "-py3-none-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "fuseline/native/prebuilt/libfuseline_torch.so" in names
    assert "fuseline/csrc/kernels/fuseline_kernels.h" in names


@pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}")
@needs_cxx
@pytest.mark.parametrize("asked", [["--all-gpus"], ["--arch", "8.0", "sm_90"]])
def test_plans_the_kernels_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    assert run(["build", "--dry-run", "--json", *asked]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) - {"fuseline_direct"} == {"fuseline_torch", "fuseline_kernels"}


@needs_cxx
def test_without_a_gpu_no_kernels_are_built_and_that_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuseline.native.ahead.majors_here", lambda: ())
    assert run(["build", "--dry-run", "--json"]) == 0
    said = capsys.readouterr()
    assert "fuseline_kernels" not in json.loads(said.out)
    assert "no CUDA kernels are built. This machine has no GPU;" in said.err
    assert run(["build", "--kernels-only"]) == 2
    assert "--all-gpus" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["7.5", "hopper", "sm_9"])
def test_an_architecture_without_kernels_is_refused(capsys: pytest.CaptureFixture[str], arch: str) -> None:
    assert run(["build", "--arch", arch]) == 2
    assert f"--arch {arch}: give compute capabilities from 8.0" in capsys.readouterr().err


def test_all_gpus_and_one_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "--all-gpus", "--arch", "9.0"]) == 2
    assert "exclude each other" in capsys.readouterr().err
