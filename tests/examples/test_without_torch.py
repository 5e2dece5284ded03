"""examples/without_torch: the signatures are the header's, the scripts are right and load no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import fuseline

EXAMPLES = Path(__file__).parents[2] / "examples" / "without_torch"
HEADER = Path(fuseline.__file__).parent / "csrc" / "kernels" / "fuseline_kernels.h"


@pytest.fixture
def kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_kernels", EXAMPLES / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parameters(name: str) -> list[str]:
    """The parameters of a function in the header, as written there."""
    found = re.search(rf"\b{name}\(([^;]*)\);", HEADER.read_text())
    assert found is not None, name
    listed = " ".join(found[1].split())
    return [] if listed == "void" else listed.split(", ")


def kind(parameter: str) -> str:
    if "*" in parameter or "[" in parameter:
        return "pointer"
    return parameter.split()[0]


def test_the_signatures_are_the_headers(kernels: ModuleType) -> None:
    kinds = {
        kernels.POINTER: "pointer",
        kernels.STRIDES: "pointer",
        kernels.SIZE: "int64_t",
        kernels.INT: "int",
        kernels.DOUBLE: "double",
    }
    for name, (arguments, _) in kernels.SIGNATURES.items():
        assert [kinds[argument] for argument in arguments] == [kind(p) for p in parameters(name)], name
    version = re.search(r"define FUSELINE_KERNELS_ABI_VERSION (\d+)", HEADER.read_text())
    assert version is not None
    assert int(version[1]) == kernels.ABI_VERSION


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script)], capture_output=True, text=True, timeout=280, env=os.environ
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_the_script_says_so() -> None:
    done = run("with_ctypes.py")
    assert done.returncode == 1
    assert "There is no CUDA driver here" in done.stderr


STREAM = 77


class HostArray(numpy.ndarray):
    """An array on the host that tells its address as CuPy's do."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class HostLibrary:
    """What the kernel library is asked for, over addresses of the host."""

    def fuseline_softmax_forward(self, x: int, *rest: Any) -> int:
        mask, _, _, B, H, rows, n, scale, causal, y, dtype, stream = rest
        assert (mask, B, H, causal, dtype, stream) == (None, 1, 1, 0, 0, STREAM)
        wide = scale * seen(x, rows, n).astype(numpy.float64)
        powers = numpy.exp(wide - wide.max(1, keepdims=True))
        seen(y, rows, n)[:] = powers / powers.sum(1, keepdims=True)
        return 0

    def fuseline_layer_norm_forward(self, x: int, weight: int, bias: int, y: int, *rest: Any) -> int:
        mean, rstd, rows, n, eps, dtype, weight_dtype, stream = rest
        assert (mean, rstd, dtype, weight_dtype, stream) == (None, None, 0, 0, STREAM)
        wide = seen(x, rows, n).astype(numpy.float64)
        normed = (wide - wide.mean(1, keepdims=True)) / numpy.sqrt(wide.var(1, keepdims=True) + eps)
        seen(y, rows, n)[:] = normed * seen(weight, 1, n) + seen(bias, 1, n)
        return 0


def seen(address: int, rows: int, n: int) -> numpy.ndarray:
    floats = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    return numpy.ctypeslib.as_array(floats, (rows, n))


def cupy_on_the_host() -> ModuleType:
    class Stream:
        ptr = STREAM

        def __init__(self, non_blocking: bool) -> None:
            assert non_blocking

        def __enter__(self) -> None: ...

        def __exit__(self, *reason: object) -> None: ...

    generator = numpy.random.default_rng(0)
    module = ModuleType("cupy")
    for name in ("float32", "float64", "empty_like", "exp", "sqrt", "linalg"):
        setattr(module, name, getattr(numpy, name))
    drawn = lambda shape, dtype: generator.standard_normal(shape, dtype).view(HostArray)  # noqa: E731
    module.random = SimpleNamespace(standard_normal=drawn)  # type: ignore[attr-defined]
    module.cuda = SimpleNamespace(Stream=Stream)  # type: ignore[attr-defined]
    return module


def test_what_the_cupy_script_asks_of_the_library(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CuPy and the library stand on the host here: addresses, sizes and the stream come as they should."""

    class HostKernels(kernels.Kernels):
        def __init__(self, path: str) -> None:
            self.library = HostLibrary()

    kernels.Kernels, kernels.find_library = HostKernels, lambda: "on the host"
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setitem(sys.modules, "cupy", cupy_on_the_host())
    runpy.run_path(str(EXAMPLES / "with_cupy.py"), run_name="__main__")
    assert capsys.readouterr().out.count("relative error") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("script", ["with_ctypes.py", "with_cupy.py"])
def test_softmax_and_layer_norm_are_right_without_torch_in_the_process(script: str) -> None:
    if script == "with_cupy.py" and importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("relative error") == 2
    assert "torch in this process: False" in done.stdout
