"""What to measure: ops, dtypes, row lengths, numbers of rows, peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fuseline.bench.drawn import LABEL, check_count, drawn_lengths
from fuseline.bench.ops.bound import LOSSES
from fuseline.bench.ops.measure import Effort
from fuseline.bench.peers import PEERS, Peer, find_peers
from fuseline.errors import InputError, unknown_name
from fuseline.ops import Case, Op, get, registered
from fuseline.records.record import Scalar

MIXED = "mixed"
"""Norms as autocast calls them: a bfloat16 branch beside a float32 stream, with float32 weights."""
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    MIXED: torch.bfloat16,
}
OWN_MULTIPLE = 16  # of lengths drawn for an op with lengths of its own: heads, widths, vocabularies
CHECKED_ELEMENTS = 2**28  # float64 of more, and of what its gradient takes, is more than a GPU holds


@dataclass(frozen=True)
class Place:
    """One op at one dtype, or in `mixed` precision, on `rows` rows of length n."""

    op: Op
    dtype: torch.dtype
    rows: int
    n: int
    drawn: bool = False
    mixed: bool = False

    @property
    def case(self) -> Case:
        case = self.op.sweep(self.rows, self.n)
        extra = (self.op.mixed or {}) if self.mixed else {}
        return replace(case, options={**case.options, **extra})

    @property
    def fewer(self) -> Place | None:
        """The same with fewer rows to take errors on, where float64 of all of them would not fit."""
        most = max(1, CHECKED_ELEMENTS // self.n)
        return replace(self, rows=most) if most < self.rows else None

    @property
    def checked(self) -> Case | None:
        return self.fewer.case if self.fewer else None

    @property
    def dtype_name(self) -> str:
        return MIXED if self.mixed else str(self.dtype).removeprefix("torch.")

    def key(self) -> dict[str, Scalar]:
        """The place as it stands in records."""
        key: dict[str, Scalar] = {
            "op": self.op.name,
            "dtype": self.dtype_name,
            "rows": self.rows,
            "n": self.n,
        }
        return {**key, LABEL: True} if self.drawn else key

    def words(self) -> str:
        return f"{self.op.name} {self.dtype_name} {self.rows} x {self.n}"


@dataclass(frozen=True)
class OpsBench:
    """What to measure.

    `elements` maps a dtype's name to the elements of a matrix: a case is elements/n rows of length n, or
    `loss_rows` tokens for a loss. With `rows`, those numbers of rows instead, timed in CUDA graphs alone.
    `own_lengths`: an op that has row lengths of its own (vocabularies) is measured at those. Besides, each op
    is measured at `drawn` lengths between its shortest and its longest, drawn from `seed`.
    """

    device: torch.device
    lengths: tuple[int, ...]
    elements: dict[str, int]
    effort: Effort
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    peers: tuple[str, ...] = tuple(PEERS)
    rows: tuple[int, ...] = ()
    own_lengths: bool = False
    drawn: int = 0
    loss_rows: int | None = None
    jobs: int = 0
    budget_seconds: float | None = None
    resume: bool = False
    seed: int = 1337

    def __post_init__(self) -> None:
        for name in self.dtypes:
            if name not in DTYPES:
                raise unknown_name("dtype", name, DTYPES)
        for n in self.lengths:
            if n < 1:
                raise InputError(
                    f"A row of length {n} has nothing in it: --lengths takes whole numbers from 1."
                )
        for rows in self.rows:
            if rows < 1:
                raise InputError(f"{rows} rows are none: --rows takes whole numbers from 1.")
        check_count(self.drawn)
        if not self.dtypes or not self.lengths or not self.contenders:
            raise InputError("Nothing to measure: name at least one dtype, one length and one peer.")
        for name in self.ops:
            get(name)

    @property
    def contenders(self) -> tuple[Peer, ...]:
        return find_peers(self.peers)

    @property
    def only_captured(self) -> bool:
        return bool(self.rows)

    def places(self) -> Iterator[Place]:
        """All that is measured, in order."""
        for op in map(get, self.ops) if self.ops else registered():
            for name in self.dtypes:
                dtype = DTYPES[name]
                drawn = self._drawn_of(op)
                for n in (*self._lengths_of(op), *drawn):
                    for rows in self._rows_of(op, name, n):
                        if dtype in op.dtypes and (name != MIXED or op.mixed is not None):
                            yield Place(op, dtype, rows, n, drawn=n in drawn, mixed=name == MIXED)

    def _lengths_of(self, op: Op) -> tuple[int, ...]:
        return op.lengths if op.lengths and self.own_lengths else self.lengths

    def _drawn_of(self, op: Op) -> tuple[int, ...]:
        known = self._lengths_of(op)
        is_own = bool(op.lengths) and self.own_lengths
        return drawn_lengths(
            self.seed,
            min(known),
            max(known),
            known,
            count=self.drawn,
            multiple=OWN_MULTIPLE if is_own else None,
        )

    def _rows_of(self, op: Op, dtype: str, n: int) -> tuple[int, ...]:
        if self.rows:
            return self.rows
        if op.name in LOSSES and self.loss_rows is not None:
            return (self.loss_rows,)
        return (max(1, self.elements[dtype] // n),)
