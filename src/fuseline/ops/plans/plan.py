"""One launch of a kernel, as csrc/kernels/plans decides it, and how answers from there are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

GRANTED_CLUSTER = 8
"""Blocks of a cluster that every GPU with clusters grants; of larger ones the launcher asks first."""

Answer = tuple[str, str, list[int]]
"""A kernel's name, the reason, and the numbers of its layout (csrc/torch/plans.cpp)."""


@dataclass(frozen=True)
class Plan:
    """One launch: which kernel, why, and how its threads are laid out."""

    work: str
    """What the launch computes, such as "forward"."""
    kernel: str
    """The name that profilers show; empty where no kernel takes the problem."""
    reason: str
    blocks: int = 0
    threads_per_row: int = 0
    """In one block."""
    rows_per_block: int = 0
    """At a time; 0 of kernels that do not go by rows, whose threads a row are all threads of a block."""
    blocks_per_row: int = 0
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""
    workspace_bytes: int = 0
    elements_per_access: int = 0
    """Of kernels that do not go by rows: their threads a row are all threads of a block. Else 0."""
    fallback: Plan | None = None
    """What runs where the GPU does not grant such clusters of blocks."""

    @property
    def layout(self) -> str:
        """How the threads are laid out, in words."""
        if self.elements_per_access or not self.rows_per_block:
            access = (
                [f"{_count(self.elements_per_access, 'element')} an access"]
                if self.elements_per_access
                else []
            )
            blocks = f"{_count(self.blocks, 'block')} of {self.threads_per_row} threads"
            if self.blocks_per_row > 1:
                blocks += f" in clusters of {self.blocks_per_row}"
            return ", ".join([blocks, *access, *self._memory()])
        threads = self.threads_per_row * self.blocks_per_row
        parts = [_count(self.blocks, "block"), f"{_count(threads, 'thread')} a row"]
        if self.blocks_per_row > 1:
            parts[-1] += f" in a cluster of {self.blocks_per_row} blocks"
        if self.rows_per_block > 1:
            parts.append(f"{self.rows_per_block} rows a block")
        return ", ".join(parts + self._memory())

    def _memory(self) -> list[str]:
        shared = [f"{self.shared_bytes:,} bytes of shared memory a block"] if self.shared_bytes else []
        workspace = [f"{self.workspace_bytes:,} bytes of workspace"] if self.workspace_bytes else []
        return shared + workspace

    def __str__(self) -> str:
        if not self.kernel:
            return f"{self.work}: {self.reason}"
        because = [f"  because {self.reason}"] if self.reason else []
        lines = [f"{self.work}: {self.kernel}", *because, f"  {self.layout}"]
        if self.fallback:
            other = f"{self.fallback.kernel}, {self.fallback.layout}"
            lines.append(f"  where the GPU grants no cluster of {self.blocks_per_row}: {other}")
        return "\n".join(lines)


def one_launch(work: str, ask: Callable[[int], Answer], refused: int = 0) -> Plan:
    """Of a call that is one launch. `ask(refused)` answers for a GPU that refuses what `refused` says."""
    kernel, reason, numbers = ask(refused)
    if not kernel:
        return Plan(work, kernel, reason)
    blocks, threads, rows, cluster, shared, refusable, workspace, wide = numbers
    fallback = None
    if cluster > GRANTED_CLUSTER:
        other = one_launch(work, ask, refusable)
        fallback = other.fallback or other  # which itself may need a cluster that is too large
    return Plan(work, kernel, reason, blocks, threads, rows, cluster, shared, workspace, wide, fallback)


def launches(work: str, kernels: Sequence[str], reason: str, numbers: Sequence[int]) -> tuple[Plan, ...]:
    """Plans of launches that run one after the other; the first has the reason and the workspace of all."""
    if not kernels:
        return (Plan(work, "", reason),)
    workspace, *rest = numbers
    plans = []
    for i, kernel in enumerate(kernels):
        blocks, threads, cluster, shared = rest[4 * i : 4 * i + 4]
        plans.append(Plan(work, kernel, "", blocks, threads, 0, cluster, shared))
    return (replace(plans[0], reason=reason, workspace_bytes=workspace), *plans[1:])


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
