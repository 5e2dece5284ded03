"""Steps that were timed, explained by one that was recorded in detail.

The k-th launch of a kernel in the one is its k-th launch in the other. So the times are those of steps that
little was recorded of, or of a replayed CUDA graph, and their ops, shapes and modules are known all the same.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fuseline.errors import InputError
from fuseline.profiling.ceilings import Ceilings
from fuseline.profiling.compiled import Fusion
from fuseline.profiling.gaps import holes
from fuseline.profiling.kinds import is_generated, kind_of
from fuseline.profiling.pieces import Piece, explained, numbered, steps_on_device, steps_on_host
from fuseline.profiling.places import Places
from fuseline.profiling.profile import Entry, Gap, Sample
from fuseline.profiling.trace import Call, Trace
from fuseline.profiling.worked import Share, shares

_GRAPH_PREFIX = re.compile(r"^graph_\d+_(?=cpp_)")
_LIBRARY = re.compile(r"^(?:extern_kernels|aten|torch\.ops\.(?P<namespace>\w+))\.(?P<op>\w+)")
UNLIKE = 0.02  # of the kernels: above, a note says that the detailed step did other work
MOSTLY = 0.5  # of the kernels explained: below, a note says that only names are known


@dataclass
class Explained:
    """`steps` are the pieces of each timed step, `chosen` the number of the one of median length."""

    trace: Trace
    steps: list[list[Piece]]
    chosen: int
    places: Places
    fusions: dict[int, Fusion] = field(default_factory=dict)
    shares: dict[int, Share] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    on_gpu: bool = True

    @property
    def pieces(self) -> list[Piece]:
        return self.steps[self.chosen]

    @property
    def begin(self) -> float:
        return min(piece.begin for piece in self.pieces)

    def dtypes(self) -> set[str]:
        """What FLOPs are done in."""
        return {share.work.dtype for share in self.shares.values() if share.work.flops} - {""}

    def entries(self, ceilings: Ceilings) -> Iterator[Entry]:
        for position, piece in enumerate(self.pieces):
            share, fusion = self.shares.get(position), self.fusions.get(position)
            floor = None if share is None else ceilings.floor_us(share.work)
            size = None if share is None else share.work.bytes
            yield Entry(
                _shown(piece.name),
                self._kind(piece, fusion),
                piece.begin - self.begin,
                piece.busy,
                piece.end - piece.begin,
                "" if piece.call is None or piece.call.name == piece.name else piece.call.name,
                self._place(piece, fusion),
                self.places.part(piece.call),
                piece.stream,
                None if share is None or size is None else size * share.part,
                None if share is None or not share.work.flops else share.work.flops * share.part,
                "" if share is None else share.work.dtype,
                None if share is None or floor is None else floor * share.part,
            )

    def gaps(self) -> Iterator[Gap]:
        following = self.steps[self.chosen + 1] if self.chosen + 1 < len(self.steps) else []
        positions = {id(piece): number for number, piece in enumerate(self.pieces)}
        after = following[0] if following and self.on_gpu else None
        for hole in holes(self.pieces, self.trace.launches, after):
            piece = hole.next
            fusion = self.fusions.get(positions.get(id(piece), -1))
            yield Gap(
                hole.begin - self.begin,
                hole.end - hole.begin,
                hole.waited,
                hole.launches,
                _asked_for(piece),
                self._place(piece, fusion),
                self.places.part(piece.call),
            )

    def samples(self) -> Iterator[tuple[Sample, ...]]:
        for pieces in self.steps:
            sums: dict[tuple[str, str], float] = defaultdict(float)
            for position, piece in enumerate(pieces):
                # Kernels are the same in each step: what inductor said of one holds for all.
                sums[_shown(piece.name), self._kind(piece, self.fusions.get(position))] += piece.busy
            yield tuple(Sample(name, kind, us) for (name, kind), us in sums.items())

    def _kind(self, piece: Piece, fusion: Fusion | None) -> str:
        return kind_of(piece.name, piece.call, () if fusion is None else fusion.operations)

    def _place(self, piece: Piece, fusion: Fusion | None) -> str:
        return self.places.place(piece.call) or ("" if fusion is None else ", ".join(fusion.places))


def explain(timed: Trace, detailed: Trace, fusions: Sequence[Fusion], *, on_gpu: bool) -> Explained:
    """Put what `detailed` and inductor know beside the times. Raises `InputError` if nothing ran."""
    cut = steps_on_device if on_gpu else steps_on_host
    steps = [pieces for pieces in cut(timed) if pieces]
    known = next((pieces for pieces in reversed(cut(detailed)) if pieces), [])
    if not steps:
        raise InputError(
            "The profiler saw no work "
            + ("on the GPU" if on_gpu else "by PyTorch")
            + " in the step. Check that the step computes something on the device that is profiled."
        )
    for pieces in steps:
        explained(pieces, known)
    chosen = _median(steps)
    found = Explained(timed, steps, chosen, Places(detailed.calls), on_gpu=on_gpu)
    found.fusions = fused(found.pieces, fusions)
    found.shares = shares(found.pieces, found.fusions, on_host=not on_gpu)
    other = _unlike(found.pieces, known)
    if other > UNLIKE:
        found.notes.append(
            f"The step that was recorded in detail ran other work than those that were timed: {other:.0%} of "
            "the kernels. Ops and places may be those of others. Profile a step that does the same each time."
        )
    named = sum(p.call is not None for p in found.pieces)
    if on_gpu and named < MOSTLY * len(found.pieces):
        found.notes.append(
            f"Of {len(found.pieces)} kernels {named} have a known op: the rest run inside a CUDA graph, "
            "where only their names are recorded."
        )
    return found


def fused(pieces: Sequence[Piece], fusions: Sequence[Fusion]) -> dict[int, Fusion]:
    """What inductor said of the kernels among `pieces`, by their position. Where code was compiled again, the
    last of a kernel's calls are those that run."""
    told: dict[str, list[Fusion]] = defaultdict(list)
    for fusion in fusions:
        told[_key(fusion.kernel)].append(fusion)
    names = [_compiled_name(piece) for piece in pieces]
    counts = Counter(name for name in names if name)
    found = {}
    for position, (name, number) in enumerate(numbered(names)):
        calls = told.get(name) or []
        index = len(calls) - counts[name] + number
        if name and calls:
            found[position] = calls[index if 0 <= index < len(calls) else min(number, len(calls) - 1)]
    return found


def _compiled_name(piece: Piece) -> str:
    """The name under which inductor knows the piece; "" for what its code does not call."""
    if is_generated(piece.name):
        return _shown(piece.name)
    call = piece.call
    if call is None or not any(_is_compiled_code(around) for around in call.around()):
        return ""
    return call.name.partition("::")[2]


def _is_compiled_code(call: Call) -> bool:
    return call.name.startswith(("## Call CompiledFxGraph", "Torch-Compiled Region", "CompiledFunction"))


def _key(kernel: str) -> str:
    library = _LIBRARY.match(kernel)
    return library["op"] if library else kernel


def _shown(name: str) -> str:
    """On a CPU generated kernels carry the number of their graph before their name."""
    return _GRAPH_PREFIX.sub("", name)


def _asked_for(piece: Piece) -> str:
    return _shown(piece.name) if piece.call is None else piece.call.name


def _unlike(pieces: Sequence[Piece], known: Sequence[Piece]) -> float:
    """The share of pieces of either that the other does not have."""
    ours, theirs = Counter(p.name for p in pieces), Counter(p.name for p in known)
    return sum(((ours - theirs) + (theirs - ours)).values()) / max(1, len(pieces) + len(known))


def _median(steps: Sequence[Sequence[Piece]]) -> int:
    lengths = [max(p.end for p in pieces) - min(p.begin for p in pieces) for pieces in steps]
    order = sorted(range(len(steps)), key=lambda i: lengths[i])
    return order[(len(order) - 1) // 2]
