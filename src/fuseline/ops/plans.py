"""Which kernel takes a problem, and why: the answer of the functions that the launchers obey themselves.

    print(fuseline.ops.explain("softmax", (64, 1024), torch.bfloat16, gpu="h200"))

For each op here one function in csrc/kernels/plans decides from the shape, dtype, addresses and the device. A
launcher launches what it says, and `explain` asks the same function, compiled into `libfuseline_torch.so`, so
that no GPU is needed and any GPU can be asked for. Attention has a picker instead: `fuseline.picker.explain`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fuseline import native
from fuseline.errors import InputError, unknown_name
from fuseline.ops.op import DTYPES


@dataclass(frozen=True)
class Gpu:
    """What plans know of a GPU. Shared memory is in bytes: what a block may ask for, and what all blocks of a
    multiprocessor share."""

    name: str
    processors: int
    shared_per_block: int
    shared_per_processor: int
    clusters: bool
    warpgroups: bool

    def numbers(self) -> list[int]:
        """In the order of `device_of` in csrc/torch/plans.cpp."""
        shared = [self.shared_per_block, self.shared_per_processor]
        return [self.processors, *shared, int(self.clusters), int(self.warpgroups)]


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 108, 166912, 167936, clusters=False, warpgroups=False),
        Gpu("l40s", 142, 101376, 102400, clusters=False, warpgroups=False),
        Gpu("h100", 132, 232448, 233472, clusters=True, warpgroups=True),
        Gpu("h200", 132, 232448, 233472, clusters=True, warpgroups=True),
        Gpu("b200", 148, 232448, 233472, clusters=True, warpgroups=False),
    )
}
"""GPUs that can be asked for by name, on any machine."""

GRANTED_CLUSTER = 8
"""Blocks of a cluster that every GPU with clusters grants; of larger ones the launcher asks first."""


@dataclass(frozen=True)
class Plan:
    """One launch: which kernel, why, and how its threads are laid out."""

    direction: str
    kernel: str
    """The name that profilers show; empty where no kernel takes the problem."""
    reason: str
    blocks: int = 0
    threads_per_row: int = 0
    """In one block."""
    rows_per_block: int = 0
    """At a time."""
    blocks_per_row: int = 0
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""
    fallback: Plan | None = None
    """What runs where the GPU does not grant such clusters of blocks."""

    @property
    def layout(self) -> str:
        """How the threads are laid out, in words."""
        threads = self.threads_per_row * self.blocks_per_row
        parts = [_count(self.blocks, "block"), f"{_count(threads, 'thread')} a row"]
        if self.blocks_per_row > 1:
            parts[-1] += f" in a cluster of {self.blocks_per_row} blocks"
        if self.rows_per_block > 1:
            parts.append(f"{self.rows_per_block} rows a block")
        if self.shared_bytes:
            parts.append(f"{self.shared_bytes:,} bytes of shared memory a block")
        return ", ".join(parts)

    def __str__(self) -> str:
        if not self.kernel:
            return f"{self.direction}: {self.reason}"
        lines = [f"{self.direction}: {self.kernel}", f"  because {self.reason}", f"  {self.layout}"]
        if self.fallback:
            other = f"{self.fallback.kernel}, {self.fallback.layout}"
            lines.append(f"  where the GPU grants no cluster of {self.blocks_per_row}: {other}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What would run for one problem of an op on one GPU, forward and backward."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gpu: Gpu
    plans: tuple[Plan, ...]

    def __str__(self) -> str:
        shape, dtype = list(self.shape), str(self.dtype).removeprefix("torch.")
        head = f"{self.op} of {shape} in {dtype} on {self.gpu.name}"
        return "\n".join([head, *map(str, self.plans)])


def explain(
    op: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    gpu: str | Gpu | None = None,
    causal: bool = False,
    masked: bool = False,
    scale: float = 1.0,
    address: int = 0,
) -> Explanation:
    """Which kernels take `op` over the last dimension of a contiguous tensor, and why.

    Args:
        op: "softmax".
        shape: of the input, [..., N].
        dtype: float32, float16 or bfloat16.
        gpu: a name in `GPUS`, or a `Gpu`; by default the current CUDA device.
        causal, masked, scale: as in the op. A mask is taken to be dense and aligned.
        address: of the tensors, modulo 128 bytes; 0 for whole tensors, which torch allocates aligned.

    Raises InputError for an op without plans, for a shape without elements, for a dtype or address that
    kernels do not take, for an unknown GPU, and where the native core is missing.
    """
    if op not in _PLANNED:
        raise InputError(
            f"{unknown_name('op with plans', op, _PLANNED)} The tables of docs/kernels.md say how the others "
            "choose; fuseline.picker.explain says it of attention."
        )
    shape = tuple(shape)
    if not shape or min(shape) < 1:
        raise InputError(f"shape is {list(shape)}; give one size of 1 or more for each dimension.")
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype}; kernels take {', '.join(map(str, DTYPES))}.")
    if address < 0 or address % dtype.itemsize:
        raise InputError(f"address is {address}; elements of {dtype} stand at multiples of {dtype.itemsize}.")
    if not native.ready("cpu"):
        raise InputError("The native core is missing, which decides. `fuseline doctor` says why.")
    on = _resolved(gpu)
    return Explanation(op, shape, dtype, on, _PLANNED[op](shape, dtype, on, causal, masked, scale, address))


def _resolved(gpu: str | Gpu | None) -> Gpu:
    if isinstance(gpu, Gpu):
        return gpu
    if gpu is not None:
        if gpu not in GPUS:
            raise unknown_name("GPU", gpu, GPUS)
        return GPUS[gpu]
    if not torch.cuda.is_available():
        raise InputError(f"There is no GPU here; name one: {', '.join(GPUS)}.")
    found = torch.cuda.get_device_properties()
    return Gpu(
        found.name,
        found.multi_processor_count,
        found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        found.shared_memory_per_multiprocessor,
        clusters=found.major >= 9,
        warpgroups=(found.major, found.minor) == (9, 0),
    )


def _softmax(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    gpu: Gpu,
    causal: bool,
    masked: bool,
    scale: float,
    address: int,
) -> tuple[Plan, ...]:
    rows, n = math.prod(shape[:-1]), shape[-1]
    problem = (gpu.numbers(), rows, n, dtype.itemsize)

    def forward(refused: int) -> _Planned:
        mask = (causal, masked, n * dtype.itemsize % 16 == 0)
        return torch.ops.fuseline.plan_softmax_forward(*problem, [address] * 2, scale, *mask, refused)

    def backward(refused: int) -> _Planned:
        return torch.ops.fuseline.plan_softmax_backward(*problem, [address] * 3, refused)

    return _plan("forward", forward), _plan("backward", backward)


_Planned = tuple[str, str, list[int]]


def _plan(direction: str, ask: Callable[[int], _Planned], refused: int = 0) -> Plan:
    kernel, reason, numbers = ask(refused)
    if not kernel:
        return Plan(direction, kernel, reason)
    blocks, threads, rows, cluster, shared, refusable = numbers
    fallback = _plan(direction, ask, refusable) if cluster > GRANTED_CLUSTER else None
    return Plan(direction, kernel, reason, blocks, threads, rows, cluster, shared, fallback)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


_PLANNED = {"softmax": _softmax}
