"""How many blocks of a kernel fit on a multiprocessor at once, and what lets no more in.

The rules are those of `cuda_occupancy.h`: registers are given to warps in steps of 256 out of four equal
files, shared memory to blocks in steps of 128 bytes, 1 KiB more than a block asks for. The shared memory is
taken to be as large as the multiprocessor can make it, which leaves the rest of that memory to the L1 cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuseline.inspection.gpus import Gpu

WARP = 32
REGISTER_FILES = 4
REGISTER_STEP = 256
SHARED_STEP = 128
RESERVED = 1024  # bytes of shared memory that CUDA keeps of each block
MOST_REGISTERS = 255  # a thread


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that run at once on one multiprocessor, and how many blocks each resource would let
    run; the smallest of those is `blocks`."""

    gpu: Gpu
    threads: int
    limits: dict[str, int]

    @property
    def blocks(self) -> int:
        return min(self.limits.values())

    @property
    def warps(self) -> int:
        return self.blocks * warps_of(self.threads)

    @property
    def share(self) -> float:
        """Of the warps that the multiprocessor can hold, from 0 to 1."""
        return self.warps / self.gpu.warps

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that let no further block in."""
        return tuple(name for name, blocks in self.limits.items() if blocks == self.blocks)


def warps_of(threads: int) -> int:
    return -(-threads // WARP)


def occupancy(gpu: Gpu, *, threads: int, registers: int, shared: int = 0, barriers: int = 0) -> Occupancy:
    """The occupancy of blocks of `threads` with `registers` a thread and `shared` bytes a block, static and
    dynamic together, without what CUDA reserves. 0 blocks: such a launch fails."""
    warps = warps_of(threads)
    limits = {
        "registers": _by_registers(gpu, warps, registers),
        "shared memory": _by_shared(gpu, shared),
        "threads": gpu.warps // warps if threads <= gpu.threads_block else 0,
        "blocks": gpu.blocks,
    }
    if gpu.counts_barriers and barriers:
        limits["barriers"] = gpu.barriers // barriers
    return Occupancy(gpu, threads, limits)


def fewer_registers(gpu: Gpu, threads: int, blocks: int) -> int:
    """The most registers a thread with which `blocks` blocks fit; 0 where no number would do."""
    by_count = range(MOST_REGISTERS, 0, -1)
    return next((n for n in by_count if _by_registers(gpu, warps_of(threads), n) >= blocks), 0)


def _by_registers(gpu: Gpu, warps: int, registers: int) -> int:
    warp = _up(registers * WARP, REGISTER_STEP)
    if registers > MOST_REGISTERS or warp * _up(warps, REGISTER_FILES) > gpu.registers:
        return 0
    return gpu.registers // REGISTER_FILES // warp * REGISTER_FILES // warps


def _by_shared(gpu: Gpu, shared: int) -> int:
    block = _up(shared + RESERVED, SHARED_STEP)
    return 0 if block > gpu.shared_block + RESERVED else gpu.shared // block


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
