"""GPUs as plans of kernels (csrc/kernels/plans) know them: the one of this machine, or any that is named."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """What plans know of a GPU. Shared memory is in bytes: what a block may ask for, and what all blocks of a
    multiprocessor share. `memory_gbs` is what the memory's clock and width give, not what a copy reaches."""

    name: str
    processors: int
    shared_per_block: int
    shared_per_processor: int
    memory_gbs: int
    clusters: bool
    warpgroups: bool

    def numbers(self) -> list[int]:
        """In the order of `device_of` in csrc/torch/plans.cpp."""
        shared = [self.shared_per_block, self.shared_per_processor]
        return [self.processors, *shared, self.memory_gbs, int(self.clusters), int(self.warpgroups)]


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 108, 166912, 167936, 1555, clusters=False, warpgroups=False),
        Gpu("l40s", 142, 101376, 102400, 864, clusters=False, warpgroups=False),
        Gpu("h100", 132, 232448, 233472, 3352, clusters=True, warpgroups=True),
        Gpu("h200", 132, 232448, 233472, 4917, clusters=True, warpgroups=True),
        Gpu("b200", 148, 232448, 233472, 7672, clusters=True, warpgroups=False),
    )
}
"""GPUs that can be asked for by name, on any machine."""
