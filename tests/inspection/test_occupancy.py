"""Occupancy, beside the numbers of CUDA's own `cuda_occupancy.h` for the same blocks."""

from __future__ import annotations

import pytest

from fuseline.errors import InputError
from fuseline.inspection import GPUS, choose_gpu, find_gpu, occupancy
from fuseline.inspection.occupancy import fewer_registers

# GPU, registers a thread, bytes of shared memory, threads, named barriers, blocks: the last as
# cudaOccMaxActiveBlocksPerMultiprocessor of CUDA 13.0 gave it.
OF_CUDA = """
80 16 0 160 4 12; 80 24 256 64 4 32; 80 32 256 768 16 2; 80 40 5136 384 16 4; 80 48 9232 192 16 6;
80 64 33792 96 16 4; 80 72 33792 1024 1 0; 80 80 66000 512 1 1; 80 96 100000 256 1 1; 80 128 160000 128 1 1;
80 168 231000 32 1 0; 80 200 231000 640 4 0; 86 16 0 320 4 4; 86 24 256 160 4 9; 86 32 5136 64 4 16;
86 40 5136 768 16 2; 86 48 9232 384 16 3; 86 64 33792 192 16 2; 86 72 66000 96 16 1; 86 96 100000 512 1 1;
86 255 0 32 1 8; 89 16 0 640 4 2; 89 24 256 320 4 4; 89 32 5136 160 4 9; 89 40 9232 64 4 9;
89 48 9232 768 16 1; 89 64 33792 384 16 2; 89 72 66000 192 16 1; 89 80 100000 96 16 1; 89 255 0 128 1 2;
90 16 256 32 1 32; 90 24 256 640 4 3; 90 32 5136 320 4 6; 90 40 9232 160 4 9; 90 48 33792 64 4 6;
90 64 33792 768 16 1; 90 72 66000 384 16 2; 90 80 100000 192 16 2; 90 96 160000 96 16 1;
90 128 160000 1024 1 0; 90 168 231000 512 1 0; 90 255 0 256 1 1; 90 16 0 64 4 16; 90 16 0 96 16 4;
100 16 256 128 1 16; 100 24 5136 32 1 32; 100 32 5136 640 4 3; 100 40 9232 320 4 4;
100 48 33792 160 4 6; 100 64 66000 64 4 3;
100 72 66000 768 16 1; 100 80 100000 384 16 2; 100 128 231000 96 16 1; 100 255 0 512 1 0
"""


@pytest.mark.parametrize("line", [line.strip() for line in OF_CUDA.split(";")])
def test_as_many_blocks_as_cuda_says(line: str) -> None:
    gpu, registers, shared, threads, barriers, blocks = map(int, line.split())
    found = occupancy(
        find_gpu(str(gpu)), threads=threads, registers=registers, shared=shared, barriers=barriers
    )
    assert found.blocks == blocks


@pytest.mark.parametrize(
    "registers, shared, threads, barriers, limit",
    [
        (128, 0, 256, 0, "registers"),
        (32, 60_000, 256, 0, "shared memory"),
        (16, 0, 1024, 0, "threads"),
        (16, 0, 32, 0, "blocks"),
        (16, 0, 64, 16, "barriers"),
    ],
)
def test_names_what_lets_no_more_in(
    registers: int, shared: int, threads: int, barriers: int, limit: str
) -> None:
    found = occupancy(GPUS["sm_90"], threads=threads, registers=registers, shared=shared, barriers=barriers)
    assert found.limited_by == (limit,)
    assert found.share == found.warps / 64 == found.blocks * threads / 2048


def test_one_register_more_costs_the_block() -> None:
    gpu = GPUS["sm_90"]
    most = fewer_registers(gpu, 384, 2)
    assert occupancy(gpu, threads=384, registers=most).limits["registers"] == 2
    assert occupancy(gpu, threads=384, registers=most + 1).limits["registers"] == 1
    assert fewer_registers(gpu, 1024, 9) == 0


@pytest.mark.parametrize("name", ["sm_90", "SM_90", "sm_90a", "90", "9.0", "h100", "H200"])
def test_a_gpu_by_any_of_its_names(name: str) -> None:
    assert choose_gpu(name) is GPUS["sm_90"]


def test_a_gpu_without_figures_is_refused() -> None:
    with pytest.raises(InputError, match=r"no GPU named 'V100'.*A100"):
        find_gpu("V100")
