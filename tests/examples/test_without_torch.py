"""examples/without_torch: the signatures are the header's, the scripts are right and load no torch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


@pytest.mark.gpu
@pytest.mark.parametrize("script", ["with_ctypes.py", "with_cupy.py"])
def test_softmax_and_layer_norm_are_right_without_torch_in_the_process(script: str) -> None:
    if script == "with_cupy.py" and importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("relative error") == 2
    assert "torch in this process: False" in done.stdout
