"""Layouts worth trying for many rows of the norms (csrc/kernels/norms.cu), by what kernels have room for.

A kernel refuses what it does not hold, so these need not be exact: they leave out what is idle or too much by
far.
"""

from __future__ import annotations

from collections.abc import Iterator

from fuseline.native.layouts import VECTOR_BYTES, WARP, Layout

CLUSTERS = (1, 2, 4, 8, 16)
MOST_THREADS = 512
PART_VECTORS = (64, 1024)
"""Of a warp's part of a row that waits in shared memory: fewer are idle, more are none's."""
PIECE_COLUMNS = 1024
"""Of a warp, where rows come in pieces."""
SHORTEST_PIECES = 4096


def norm_layouts(norm: str, direction: str, n: int, element_size: int) -> Iterator[Layout]:
    """`norm`: of `fuseline.native.kernels.NORMS`; `direction`: forward or backward."""
    adds = "add" in norm
    vectors = n * element_size // VECTOR_BYTES
    if direction == "backward":
        yield from _tiles(vectors)
        yield from _held_backward(vectors, (1, 2) if adds or element_size == 2 else (1, 2, 4))
        yield from _rings_backward(vectors, adds, element_size)
        yield from _pieces(n, (1, 2) if element_size == 4 else (2,))
        return
    yield from _held(vectors, adds)
    yield from _copied(vectors, adds, "dropout" in norm, element_size)
    if adds:
        yield from _rings(n, element_size)
    else:
        yield from _packed(vectors, element_size)
    if adds or element_size == 4:
        yield from _pieces(n, (2,))


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _held(vectors: int, adds: bool) -> Iterator[Layout]:
    for held in (1, 2, 3, 4):
        threads = -(-vectors // held)
        if threads <= WARP:
            for block in (64, 128, 256):
                if held <= vectors:
                    yield Layout(held, block, way="held")
        elif held != 3 and threads <= MOST_THREADS:
            whole = _up(threads, WARP)
            for beside in (1, 2, 4):
                if whole * beside <= MOST_THREADS:
                    yield Layout(held, whole * beside, way="held")
            if held in (1, 4):
                yield Layout(held, whole, 1, 1, "held")
    for cluster in (2, 4, 8):
        for held in (1, 2, 4):
            threads = _up(-(-vectors // (held * cluster)), WARP)
            if 2 * WARP <= threads <= MOST_THREADS:
                yield Layout(held, threads, cluster, way="held")
                if held == 4 and not adds:
                    yield Layout(held, threads, cluster, 1, "held")


def _packed(vectors: int, element_size: int) -> Iterator[Layout]:
    threads = _up(-(-vectors // 4), WARP)
    if element_size == 2 and WARP < threads <= MOST_THREADS:
        yield Layout(4, threads, way="packed")


def _copied(vectors: int, adds: bool, masked: bool, element_size: int) -> Iterator[Layout]:
    for cluster in CLUSTERS:
        for warps in (2, 4, 8, 16):
            part = _up(-(-vectors // (cluster * warps)), 8)
            if not PART_VECTORS[0] <= part <= PART_VECTORS[1] or (masked and warps == 16):
                continue
            yield Layout(0, warps * WARP, cluster, 1, "copied")
            if adds and element_size == 4:
                for pieces in (1, 2, 3):
                    if part > 128 * pieces:
                        yield Layout(pieces, warps * WARP, cluster, 1, "copied")
            if not adds:
                yield Layout(0, warps * WARP, cluster, 2, "copied")
                if element_size == 2 and warps <= 8 and warps * cluster <= WARP:
                    yield Layout(0, warps * WARP, cluster, 1, "light")
                    yield Layout(0, warps * WARP, cluster, 2, "light")


def _rings(n: int, element_size: int) -> Iterator[Layout]:
    """Of a sum: `held` is how many blocks a multiprocessor has."""
    warps = -(-n * element_size // (4 * WARP * VECTOR_BYTES))
    for cluster in CLUSTERS:
        for block in (256, 512):
            if warps <= cluster * block // WARP and (cluster == 1 or warps >= 2 * cluster):
                for blocks in (1, 2) if block == 256 else (1,):
                    for stages in (3, 4):
                        yield Layout(blocks, block, cluster, stages, "ring")


def _pieces(n: int, held: tuple[int, ...]) -> Iterator[Layout]:
    for cluster in CLUSTERS[1:]:
        warps = -(-n // (cluster * PIECE_COLUMNS))
        if n >= SHORTEST_PIECES and 2 <= warps <= 16:
            for slots in held:
                yield Layout(slots, warps * WARP, cluster, way="pieces")


def _tiles(vectors: int) -> Iterator[Layout]:
    if vectors <= WARP:
        yield Layout(1, WARP, way="tiles")


def _held_backward(vectors: int, held: tuple[int, ...]) -> Iterator[Layout]:
    for slots in held:
        if vectors <= WARP:
            if slots == 1:
                yield Layout(1, 256, way="held")
            continue
        for cluster in CLUSTERS:
            threads = -(-vectors // (slots * cluster))
            for block in (256, 512):
                if (
                    threads <= block
                    and (cluster == 1 or threads >= 4 * WARP)
                    and (block == 256 or threads > 256)
                ):
                    yield Layout(slots, block, cluster, way="held")


def _rings_backward(vectors: int, adds: bool, element_size: int) -> Iterator[Layout]:
    for slots in (2, 3, 4):
        most = 640 if slots == 2 and not adds else MOST_THREADS
        if (slots == 4 and adds) or (slots == 3 and not (adds and element_size == 2 and vectors <= 3 * WARP)):
            continue
        for cluster in CLUSTERS:
            threads = _up(-(-vectors // (slots * cluster)), WARP)
            if threads > most or (cluster > 1 and (slots == 3 or threads < 2 * WARP)) or vectors <= WARP // 2:
                continue
            counts = [count for count in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16) if count * threads <= most]
            groups = counts[-4:] if cluster == 1 else [1]
            for count in groups:
                for stages in (3, 4, 6):
                    yield Layout(slots, threads * count, cluster, stages, "ring")
