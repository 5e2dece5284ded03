"""What is loaded, what is said where it is not, and that everything still runs then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuseline import native
from fuseline.native import library
from fuseline.native.compilers import Compiler, Search
from fuseline.native.library import Loader, NativeError
from fuseline.native.recipes import KERNELS_NAME, TORCH_NAME
from fuseline.native.seals import seal

NO_CXX = Search("C++ compiler", None, ("g++ on PATH: not there",), "Install g++.")
NO_NVCC = Search("nvcc", None, ("nvcc on PATH: not there",), "Install the toolkit.")


def bare_loader(prebuilt: Path) -> Loader:
    return Loader(prebuilt, cxx=lambda: NO_CXX, nvcc=lambda: NO_NVCC)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_this_process_runs_natively() -> None:
    assert native.load()
    assert native.ready("cpu")
    status = native.status()
    assert status.torch.loaded
    assert status.torch.path.is_file()
    if not torch.cuda.is_available():
        assert status.kernels.reason == "torch sees no CUDA device."


def test_without_a_compiler_it_says_what_is_missing(tmp_path: Path) -> None:
    loader = bare_loader(tmp_path)
    assert not loader.ready("cpu")
    status = loader.status(TORCH_NAME)
    assert (status.loaded, status.mend) == (False, "Install g++.")
    assert status.reason == "no C++ compiler was found (g++ on PATH: not there)."
    assert not loader.ready("cuda")
    assert "libfuseline_torch.so, which calls it" in loader.status(KERNELS_NAME).reason


def test_a_fallback_is_said_once_with_the_reason_and_the_mend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FUSELINE_STRICT", raising=False)
    loader = bare_loader(tmp_path)
    assert not loader.ready("cpu")
    said = capsys.readouterr().err
    assert said.startswith("fuseline: ops on cpu run their PyTorch references")
    assert "no C++ compiler was found (g++ on PATH: not there). Install g++." in said
    assert not loader.ready("cpu")
    assert capsys.readouterr().err == ""


def test_a_fallback_that_was_asked_for_is_not_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSELINE_NATIVE", "0")
    assert not bare_loader(tmp_path).ready("cpu")
    assert capsys.readouterr().err == ""


def test_what_is_not_built_is_known_without_building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "cache"))
    cxx = Search("C++ compiler", Compiler(("g++",), "g++ 12", ""), (), "")
    loader = Loader(tmp_path, cxx=lambda: cxx, nvcc=lambda: NO_NVCC)
    assert loader.unbuilt(["cpu"]) == [TORCH_NAME]
    assert loader.unbuilt(["cpu", "cuda"]) == [TORCH_NAME]  # there is nothing to compile kernels with
    assert bare_loader(tmp_path).unbuilt(["cpu"]) == []
    assert not (tmp_path / "cache").exists()


def test_other_devices_run_references() -> None:
    assert not native.ready("mps")


def test_strict_makes_a_fallback_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_STRICT", "1")
    loader = bare_loader(tmp_path)
    for _ in range(2):  # an error is not remembered as an answer
        with pytest.raises(NativeError, match=r"on cpu would run their references: .*g\+\+.*Install g\+\+"):
            loader.ready("cpu")
    with pytest.raises(NativeError, match="no kernels for mps"):
        loader.ready("mps")


def test_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_NATIVE", "0")
    loader = Loader(tmp_path)
    assert not loader.ready("cpu")
    assert "FUSELINE_NATIVE=0" in loader.status(TORCH_NAME).reason


def test_a_broken_library_is_named(tmp_path: Path) -> None:
    (tmp_path / f"lib{TORCH_NAME}.so").write_text("not a library")
    seal(tmp_path / f"lib{TORCH_NAME}.so")
    (tmp_path / library.MANIFEST).write_text(json.dumps({"torch": library.public_torch_version()}))
    loader = bare_loader(tmp_path)
    assert not loader.ready("cpu")
    status = loader.status(TORCH_NAME)
    assert status.path == tmp_path / f"lib{TORCH_NAME}.so"
    assert "it does not load" in status.reason
    assert "Delete" in status.mend


def test_a_wheel_for_another_torch_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / f"lib{TORCH_NAME}.so").write_text("for another torch")
    seal(tmp_path / f"lib{TORCH_NAME}.so")
    (tmp_path / library.MANIFEST).write_text(json.dumps({"torch": "1.0.0"}))
    loader = bare_loader(tmp_path)
    assert not loader.ready("cpu")
    assert "no C++ compiler" in loader.status(TORCH_NAME).reason


@pytest.mark.parametrize("version, complaint", [(12080, "the driver knows CUDA 12.8"), (13000, None)])
def test_an_old_driver_is_named(version: int, complaint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "driver_version", lambda: version)
    if complaint is None:
        library._check_driver(13)
        return
    with pytest.raises(library._UnavailableError, match=complaint) as caught:
        library._check_driver(13)
    assert "580" in caught.value.mend


def test_a_foreign_library_is_not_taken_for_the_kernels(tmp_path: Path) -> None:
    path = native.status().torch.path
    assert "interface version 0" in library._hand_over(path, path)
    assert "cannot open" in library._hand_over(path, tmp_path / "missing.so")


def test_everything_runs_without_a_compiler(tmp_path: Path) -> None:
    code = (
        "import torch, fuseline.ops as ops, fuseline.native as native\n"
        "x = torch.randn(3, 5, requires_grad=True)\n"
        "ops.layer_norm(ops.softmax(x), 5).sum().backward()\n"
        "torch.compile(ops.softmax, fullgraph=True, backend='eager')(x)\n"
        "assert not hasattr(torch.ops.fuseline, 'softmax')\n"
        "print(native.status().torch.reason)\n"
    )
    done = run_python(code, PATH=str(tmp_path), FUSELINE_CACHE=str(tmp_path / "cache"), CXX="")
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler was found" in done.stdout
    strict = run_python(
        code, PATH=str(tmp_path), FUSELINE_CACHE=str(tmp_path / "cache"), CXX="", FUSELINE_STRICT="1"
    )
    assert strict.returncode != 0
    assert "NativeError: FUSELINE_STRICT is set" in strict.stderr


def test_importing_looks_for_nothing(tmp_path: Path) -> None:
    done = run_python(
        "import fuseline.ops, fuseline.nn, fuseline.native as native, sys\n"
        "print(native.status().torch.reason)\n"
        "assert 'torch._dynamo' not in sys.modules\n",
        FUSELINE_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "nothing has asked for it yet\n"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("first", ["compiled", "eager"])
def test_first_use_may_be_inside_a_full_graph(first: str) -> None:
    wrap = (
        "torch.compile(ops.softmax, fullgraph=True, backend='eager')"
        if first == "compiled"
        else "ops.softmax"
    )
    done = run_python(
        f"import torch, fuseline.ops as ops\nf = {wrap}\nx = torch.randn(4, 6)\n"
        "torch.testing.assert_close(f(x), torch.softmax(x, -1))\n"
        "assert hasattr(torch.ops.fuseline, 'softmax')\n"
    )
    assert done.returncode == 0, done.stderr


def test_first_use_by_many_threads_loads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    opened: list[str] = []
    path = native.status().torch.path
    loader = Loader()
    open_torch: Callable[[], Path] = lambda: opened.append("torch") or path  # noqa: E731
    monkeypatch.setattr(loader, "_open_torch", open_torch)
    threads = [threading.Thread(target=loader.ready, args=("cpu",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == ["torch"]


@pytest.mark.gpu
def test_kernels_are_loaded_on_a_gpu() -> None:
    assert native.ready("cuda"), native.status().kernels
    assert native.status().kernels.loaded
