"""Launch bounds and barriers, read from the machine code's ELF file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fuseline.inspection.cubin import Bounds, read_bounds
from fuseline.native.compilers import find_nvcc

CUBIN = Path(__file__).parent / "recorded" / "liba.cubin"  # ptxas 13.0's
SOURCE = """
__global__ void __launch_bounds__(192) cube(float* x) { x[threadIdx.x] = 1; __syncthreads(); x[0] = 2; }
__global__ void any(float* x) { x[threadIdx.x] = 1; }
"""


def test_bounds_of_every_kernel() -> None:
    assert read_bounds(CUBIN.read_bytes()) == {
        "_ZN8fuseline5plainEPf": Bounds(None, 1),
        "_ZN8fuseline10scale_rowsI13__nv_bfloat16Li256EEEvPKT_PS2_f": Bounds(256, 1),
        "_Z7spilledPfi": Bounds(1024, 0),
    }


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x01\x01", b"PK\x03\x04" * 20])
def test_what_is_no_machine_code_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a 64-bit ELF file"):
        read_bounds(content)


def test_a_file_that_is_cut_off_is_refused() -> None:
    with pytest.raises(ValueError, match="cut off"):
        read_bounds(CUBIN.read_bytes()[:4000])


@pytest.mark.slow
def test_what_nvcc_writes_today(tmp_path: Path) -> None:
    nvcc = find_nvcc().compiler
    if nvcc is None:
        pytest.skip(f"needs nvcc: {find_nvcc().reason}")
    (tmp_path / "a.cu").write_text(SOURCE)
    for arch in ("sm_80", "sm_90"):
        subprocess.run(
            [*nvcc.command, "-cubin", f"-arch={arch}", "-o", "a.cubin", "a.cu"], cwd=tmp_path, check=True
        )
        found = read_bounds((tmp_path / "a.cubin").read_bytes())
        assert found == {"_Z4cubePf": Bounds(192, 1), "_Z3anyPf": Bounds(None, 0)}
