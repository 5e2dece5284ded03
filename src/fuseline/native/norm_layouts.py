"""Layouts worth trying for many rows of the norms, and what their plans (csrc/kernels/plans) make of one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from fuseline.native.gpus import GPUS
from fuseline.native.layouts import (
    PART_VECTORS,
    ROW_KERNELS,
    RULES,
    VECTOR_BYTES,
    WAITING_WARPS,
    WARP,
    Layout,
    shares_evenly,
)

CLUSTERS = (1, 2, 4, 8, 16)
RING_BLOCKS = (256, 320, 384, 448, 512, 576, 640)

Taken = tuple[int | str, ...]


def norm_layouts(norm: str, direction: str, n: int, element_size: int) -> Iterator[Layout]:
    """Those that differ at this length.

    `norm`: of `fuseline.native.kernels.NORMS`; `direction`: forward or backward.
    """
    seen: set[Taken] = set()
    for layout in every_layout(direction):
        key = taken(norm, direction, n, element_size, layout)
        if key and key not in seen:
            seen.add(key)
            yield layout


def every_layout(direction: str) -> Iterator[Layout]:
    """Of any norm, dtype and length."""
    yield RULES
    if direction == "backward":
        yield Layout(1, WARP, kernel="tiles")
        for held, cluster in product((1, 2), CLUSTERS):
            yield Layout(held, 512, cluster, kernel="held")
        for held, block, cluster, stages in product((2, 3, 4), RING_BLOCKS, CLUSTERS, (3, 4, 5, 6)):
            yield Layout(held, block, cluster, stages, "ring")
    else:
        for held, block, cluster, stages in product((1, 2, 3, 4), (64, 128, 256, 512), CLUSTERS[:4], (0, 1)):
            yield Layout(held, block, cluster, stages, "held")
        yield Layout(4, 512, kernel="packed")
        blocks = tuple(warps * WARP for warps in WAITING_WARPS)
        for kernel, block, cluster, stages in product(("copied", "light"), blocks, CLUSTERS, (1, 2)):
            yield Layout(0, block, cluster, stages, kernel)


def taken(norm: str, direction: str, n: int, element_size: int, layout: Layout) -> Taken | None:
    """What the plan makes of a layout, the same for layouts that are one at this length; None for those that
    no kernel has, or that idle. Needs the native core, which decides."""
    if layout.kernel == RULES.kernel:
        return (layout.kernel,)
    vectors = n * element_size // VECTOR_BYTES  # of the longest rows that keep to 16-byte steps
    if _idles(vectors, direction, layout):
        return None
    centred, of = "layer" in norm, 2 if "dropout" in norm else int("add" in norm)
    numbers = layout.held, layout.block, layout.cluster, layout.stages, ROW_KERNELS.index(layout.kernel)
    width = vectors * VECTOR_BYTES // element_size
    asked = GPUS["h100"].numbers(), width, element_size, centred, of, direction == "backward", list(numbers)
    found = tuple(torch.ops.fuseline.plan_norm_layout(*asked))
    return found or None


def _idles(vectors: int, direction: str, layout: Layout) -> bool:
    """Whether many threads of a block would have nothing of a row."""
    if layout.kernel in ("copied", "light"):
        warps, cluster = layout.block // WARP, layout.cluster
        part = -(-vectors // (cluster * warps * 8)) * 8
        few = not PART_VECTORS[0] <= part <= PART_VECTORS[1]
        return few or not shares_evenly(vectors, warps, cluster)
    if layout.kernel in ("tiles", "packed"):
        return False
    threads = -(-vectors // (layout.held * layout.cluster))
    least = 4 * WARP if direction == "backward" and layout.kernel == "held" else 2 * WARP
    return layout.cluster > 1 and -(-threads // WARP) * WARP < least
