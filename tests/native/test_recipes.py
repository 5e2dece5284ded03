"""What libraries are built from: torch's folders are where torch says, and kernels are packed."""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from fuseline.native import recipes
from fuseline.native.compilers import find_cxx, find_nvcc

PACKED = b"\x50\xed\x55\xba"  # what begins the part of an object that holds code for GPUs


def test_torchs_folders_are_where_torch_says() -> None:
    assert recipes.torch_include_paths() == cpp_extension.include_paths("cpu")
    assert [recipes.torch_library_path()] == cpp_extension.library_paths("cpu")


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}")
def test_machine_code_is_packed(tmp_path: Path) -> None:
    """As nvcc leaves it, it would shrink to a ninth."""
    nvcc, cxx = find_nvcc().compiler, find_cxx().compiler
    assert nvcc is not None
    assert cxx is not None
    units = recipes.kernels_recipe(nvcc, cxx, (9,)).units
    (unit,) = (unit for unit in units if unit.source.stem == "gradient_norm")
    made = tmp_path / "gradient_norm.o"
    subprocess.run(unit.command(made), check=True)
    code = made.read_bytes()
    begin = code.index(PACKED)
    size = int.from_bytes(code[begin + 8 : begin + 16], "little")
    assert size > 4096
    assert len(zlib.compress(code[begin : begin + size])) > 0.9 * size
