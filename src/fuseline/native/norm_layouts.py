"""Layouts worth trying for many rows of the norms, and what launchers (kernels/norms/norms.cu) make of one.

A kernel refuses what it does not hold, so what stands here need not be exact: it leaves out what is idle, or
far too much.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fuseline.native.layouts import (
    PART_VECTORS,
    RULES,
    VECTOR_BYTES,
    WAITING_WARPS,
    WARP,
    Layout,
    shares_evenly,
)

CLUSTERS = (1, 2, 4, 8, 16)
MOST_THREADS = 512
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
        for held, cluster in product((1, 2, 4), CLUSTERS):
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
    """The same for layouts that are one at this length; None for those that no kernel has, or that idle."""
    vectors, adds, masked = n * element_size // VECTOR_BYTES, "add" in norm, "dropout" in norm
    kernel, held, block = layout.kernel, layout.held, layout.block
    cluster, stages = layout.cluster, layout.stages
    if kernel == RULES.kernel:
        return (kernel,)
    if kernel == "ring" and direction == "forward":
        return None
    if kernel == "tiles":
        return (kernel,) if vectors <= WARP else None
    if kernel == "packed":
        fits = element_size == 2 and not adds and vectors // 4 > WARP and -(-vectors // 4) <= MOST_THREADS
        return (kernel,) if fits else None
    if kernel in ("copied", "light"):
        return _copied(vectors, adds, masked, element_size, layout)
    threads = -(-vectors // (held * cluster))
    whole = -(-threads // WARP) * WARP
    if kernel == "ring":
        most = min(block, 640 if held == 2 and not adds else MOST_THREADS)
        one_warp = adds and element_size == 2 and vectors <= 3 * WARP
        if whole > most or vectors <= WARP // 2 or (held == 3 and not one_warp) or (held == 4 and adds):
            return None
        if cluster > 1:
            return (kernel, held, cluster, stages) if held != 3 and whole >= 2 * WARP else None
        return kernel, held, 1, stages, min(16, most // whole)
    if direction == "backward":
        if held > (2 if adds or element_size == 2 else 4):
            return None
        if vectors <= WARP:
            return (kernel,) if (held, cluster) == (1, 1) else None
        fits = threads <= (384 if adds and held > 1 else MOST_THREADS) and (
            cluster == 1 or threads >= 4 * WARP
        )
        return (kernel, held, cluster) if fits else None
    if cluster == 1 and threads <= WARP:
        return (kernel, held, block) if held <= vectors and block <= 256 and stages == 0 else None
    if held == 3 or whole > MOST_THREADS or (stages and held != 4 and (held != 1 or cluster > 1)):
        return None
    if cluster > 1:
        return (kernel, held, cluster, stages) if held < 4 and whole >= 2 * WARP else None
    beside = max(1, block // whole)
    return (kernel, held, 1, stages, beside) if beside in (1, 2, 4) else None


def _copied(vectors: int, adds: bool, masked: bool, element_size: int, layout: Layout) -> Taken | None:
    warps, cluster = layout.block // WARP, layout.cluster
    part = -(-vectors // (cluster * warps * 8)) * 8
    if not shares_evenly(vectors, warps, cluster) or not PART_VECTORS[0] <= part <= PART_VECTORS[1]:
        return None
    if layout.held or (masked and warps > 8) or (adds and layout.stages == 2):
        return None
    if layout.kernel == "light" and (adds or element_size == 4 or warps > 8 or warps * cluster > WARP):
        return None
    return layout.kernel, warps, cluster, layout.stages
