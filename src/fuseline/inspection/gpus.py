"""What a multiprocessor of each GPU has for the blocks that run on it.

Figures: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and `cuda_occupancy.h`
of the CUDA toolkit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fuseline.errors import unknown_name

KIB = 1024


@dataclass(frozen=True)
class Gpu:
    """The limits of one compute capability. Sizes of shared memory are in bytes; a multiprocessor has 65,536
    registers of 32 bits on all of them, and a block at most 1,024 threads."""

    capability: tuple[int, int]
    products: str
    threads: int  # on a multiprocessor
    blocks: int
    shared: int
    shared_block: int  # of which a block may have so much, where its launcher asks for it
    counts_barriers: bool = False  # named barriers are shared by the blocks, and can run out
    registers: int = 65_536
    threads_block: int = 1024

    @property
    def name(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def barriers(self) -> int:
        """Named barriers (`bar.sync`) of a multiprocessor."""
        return 2 * self.blocks


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu((8, 0), "A100, A30", 2048, 32, 164 * KIB, 163 * KIB),
        Gpu((8, 6), "A10, A40, RTX 30", 1536, 16, 100 * KIB, 99 * KIB),
        Gpu((8, 9), "L4, L40, RTX 40", 1536, 24, 100 * KIB, 99 * KIB),
        Gpu((9, 0), "H100, H200, GH200", 2048, 32, 228 * KIB, 227 * KIB, counts_barriers=True),
        Gpu((10, 0), "B200, GB200", 2048, 32, 228 * KIB, 227 * KIB, counts_barriers=True),
    )
}


def find_gpu(name: str) -> Gpu:
    """By compute capability (`sm_90`, `sm_90a`, `90`, `9.0`) or by product (`H100`)."""
    number = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)[af]?", name.strip().lower())
    if number and (gpu := GPUS.get(f"sm_{number[1]}{number[2]}")):
        return gpu
    for gpu in GPUS.values():
        if name.strip().lower() in gpu.products.lower().split(", "):
            return gpu
    products = [one for gpu in GPUS.values() for one in gpu.products.split(", ")]
    raise unknown_name("GPU", name, [*GPUS, *products])


def choose_gpu(name: str | None = None) -> Gpu:
    """The GPU called `name`, else this machine's first, else an H100. Raises `InputError` for a GPU without
    figures here."""
    if name is not None:
        return find_gpu(name)
    import torch

    if not torch.cuda.is_available():
        return GPUS["sm_90"]
    major, minor = torch.cuda.get_device_capability()
    return find_gpu(f"sm_{major}{minor}")
