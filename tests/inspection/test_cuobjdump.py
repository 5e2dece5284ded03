"""What cuobjdump prints, read from recorded outputs of CUDA 13's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fuseline.errors import InputError
from fuseline.inspection import cuobjdump
from fuseline.inspection.cuobjdump import (
    Cuobjdump,
    Resources,
    find_cuobjdump,
    operations,
    parse_resources,
    parse_sass,
    ptx_of,
)
from fuseline.native import Search

RECORDED = Path(__file__).parent / "recorded"
PLAIN = "_ZN8fuseline5plainEPf"
SPILLED = "_Z7spilledPfi"


def _lines(name: str) -> list[str]:
    return (RECORDED / name).read_text().splitlines()


def test_resources_of_every_kernel_and_architecture() -> None:
    found = {(one.function, one.architecture): one for one in parse_resources(_lines("resources.txt"))}
    assert len(found) == 9
    assert found[PLAIN, "sm_80"] == Resources(PLAIN, "sm_80", 10, 0, 0, 360)
    assert found[PLAIN, "sm_90"] == Resources(PLAIN, "sm_90", 10, 0, 1024, 536)
    assert found[SPILLED, "sm_100"] == Resources(SPILLED, "sm_100", 16, 400, 1024, 908)


def test_the_same_kernel_of_two_sources_comes_once() -> None:
    lines = _lines("resources.txt")
    assert list(parse_resources(lines + lines)) == list(parse_resources(lines))


def test_all_banks_of_constants_count() -> None:
    lines = [
        "arch = sm_90",
        " Function k:",
        "  REG:40 STACK:8 SHARED:1024 LOCAL:16 CONSTANT[0]:560 CONSTANT[2]:88 TEXTURE:0 SURFACE:0 SAMPLER:0",
    ]
    assert list(parse_resources(lines)) == [Resources("k", "sm_90", 40, 24, 1024, 648)]


def test_instructions_without_encodings() -> None:
    found = parse_sass(_lines("sass.txt"), PLAIN)
    assert found[:2] == ["0000  LDC R1, c[0x0][0x28]", "0010  S2R R5, SR_TID.X"]
    assert found[-1] == "00f0  BRA 0xf0"  # what follows are NOPs to the end of a line of the cache
    assert len(found) == 16
    assert parse_sass(_lines("sass.txt"), SPILLED) == []


def test_instructions_are_counted_by_kind() -> None:
    counts = operations(
        ["0000  @!P0 LDG.E.128 R0, [R2]", "0010  LDG.E R1, [R3]", "0020  @UP1 UMOV UR4, 0x1", "0030  EXIT"]
    )
    assert counts == {"LDG": 2, "UMOV": 1, "EXIT": 1}


def test_ptx_of_one_kernel_with_its_head() -> None:
    found = ptx_of((RECORDED / "ptx.txt").read_text(), PLAIN)
    assert found.startswith(".version 9.0\n.target sm_90\n\n.visible .entry _ZN8fuseline5plainEPf(")
    assert found.endswith("ret;\n\n}")
    assert ptx_of((RECORDED / "ptx.txt").read_text(), SPILLED) == ""


def _program(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "cuobjdump"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_runs_the_program_and_hands_its_reason_on(tmp_path: Path) -> None:
    good = Cuobjdump(_program(tmp_path / "good", f"cat {RECORDED / 'resources.txt'}"))
    assert len(good.resources(tmp_path / "x.so")) == 9
    bad = Cuobjdump(_program(tmp_path / "bad", "echo 'cuobjdump info: no device code' >&2; exit 255"))
    with pytest.raises(InputError, match=r"could not read .*x\.so: cuobjdump info: no device code"):
        bad.resources(tmp_path / "x.so")


def test_says_what_is_missing_for_sass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Cuobjdump(_program(tmp_path / "bin", f"cat {RECORDED / 'sass.txt'}"))
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(InputError, match=r"nvdisasm.*pip install 'fuseline\[inspect\]'"):
        tool.sass(tmp_path / "x.so", "sm_90", PLAIN)


def test_is_found_on_path_or_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuobjdump, "find_nvcc", lambda: Search("nvcc", None, (), ""))
    monkeypatch.setattr(cuobjdump, "toolkit_folders", lambda: [tmp_path / "cuda" / "bin"])
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/nowhere")
    with pytest.raises(InputError, match=r"no cuobjdump here.*cuda/bin, PATH.*CUDA_HOME"):
        find_cuobjdump()
    program = _program(tmp_path / "bin", "true")
    assert find_cuobjdump().program == program
