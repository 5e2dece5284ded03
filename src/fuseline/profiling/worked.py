"""The work of each piece of a step, counted once an op: what an op does is shared out among its kernels by
their time, and what the ops inside it do is theirs alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fuseline.profiling.compiled import Fusion
from fuseline.profiling.kinds import is_generated, operations_in
from fuseline.profiling.pieces import Piece
from fuseline.profiling.trace import Call
from fuseline.profiling.work import Work, bytes_of_arguments, work_of

_LOOKS_UP = ("embedding", "index", "gather", "scatter")
"""Operations of which a kernel's arguments do not tell how much is read."""


@dataclass(frozen=True)
class Share:
    """A piece's part of the work of its op."""

    work: Work
    part: float


def shares(pieces: Sequence[Piece], fusions: Mapping[int, Fusion], *, on_host: bool) -> dict[int, Share]:
    """The share of each piece, by its position, where the work is known. `fusions` are what inductor said of
    pieces, by position as well."""
    by_call: dict[Call, list[int]] = {}
    found: dict[int, Share] = {}
    for position, piece in enumerate(pieces):
        if piece.call is not None and not is_generated(piece.name):
            by_call.setdefault(piece.call, []).append(position)
            continue
        generated = _generated(piece, fusions.get(position))
        if generated is not None:
            found[position] = Share(generated, 1.0)
    for call, work in _own_work(by_call, on_host=on_host).items():
        positions = by_call[call]
        total = sum(pieces[p].busy for p in positions)
        for p in positions:
            found[p] = Share(work, pieces[p].busy / total if total else 1.0 / len(positions))
    return found


def _generated(piece: Piece, fusion: Fusion | None) -> Work | None:
    if not is_generated(piece.name):
        return None
    size = None if fusion is None else fusion.bytes
    if size is None and piece.call is not None and not any(w in operations_in(piece.name) for w in _LOOKS_UP):
        size = bytes_of_arguments(piece.call.inputs)
    return None if not size else Work(size, 0.0, "")


def _own_work(calls: Iterable[Call], *, on_host: bool) -> dict[Call, Work]:
    """The work that each op does itself. On a GPU the ops are those that launched kernels; on the host an op
    that works has bytes to move."""
    total = {call: work for call in calls if (work := work_of(call.name, call.overload, call.inputs))}
    workers = set(total) if on_host else set(calls)
    inside = _topmost_inside(workers)
    own = {}
    for call, work in total.items():
        parts = inside.get(call, [])
        if not parts:
            own[call] = work
            continue
        # The op's own bytes cannot be told from those that pass between the ops inside it.
        flops = work.flops - sum(total[part].flops for part in parts if part in total)
        if flops > 0.01 * work.flops > 0:
            own[call] = Work(None, flops, work.dtype)
    return own


def _topmost_inside(workers: set[Call]) -> dict[Call, list[Call]]:
    """For each op that works the ops that work directly inside it, with no other of them between."""
    inside: dict[Call, list[Call]] = {}
    for call in workers:
        around = _nearest(call, workers.__contains__)
        if around is not None:
            inside.setdefault(around, []).append(call)
    return inside


def _nearest(call: Call, fits: Callable[[Call], bool]) -> Call | None:
    parent = call.parent
    while parent is not None and not fits(parent):
        parent = parent.parent
    return parent
