"""What accounts for the difference of two profiled steps: by kind of work, and by kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fuseline.profiling.profile import Profile, Row

GAINED = 3
LEAST = 0.002  # of the old step: what is less is noise


@dataclass(frozen=True)
class Change:
    """A row of one profile beside that of the other, in milliseconds a step; absent is 0. `gained_ms` is
    above 0 where the new step is faster."""

    name: str
    kind: str
    old_ms: float
    new_ms: float
    old_calls: int
    new_calls: int

    @property
    def gained_ms(self) -> float:
        return self.old_ms - self.new_ms


@dataclass(frozen=True)
class Difference:
    """The step's times by the clock, and the changes, the largest first either way. The kinds, with the time
    spent waiting among them, add up to the whole difference; on a CPU to that of the recorded steps."""

    old_ms: float
    new_ms: float
    kinds: tuple[Change, ...]
    kernels: tuple[Change, ...]

    def __str__(self) -> str:
        from fuseline.profiling.difference_text import as_text

        return as_text(self)


def difference(old: Profile, new: Profile) -> Difference:
    """The changes from `old` to `new`."""
    return Difference(
        old.whole_ms,
        new.whole_ms,
        tuple(_changes(old.by_kind(), new.by_kind())),
        tuple(_changes(old.by_kernel(), new.by_kernel())),
    )


def gained(old: Profile, new: Profile, most: int = GAINED) -> tuple[Change, ...]:
    """The kinds of work in which `new` is faster, the largest gain first; what is less than the noise of a
    step is left out."""
    changes = _changes(old.by_kind(), new.by_kind())
    ahead = [c for c in changes if c.gained_ms > LEAST * old.whole_ms]
    return tuple(sorted(ahead, key=lambda c: -c.gained_ms)[:most])


def _changes(old: Iterable[Row], new: Iterable[Row]) -> Sequence[Change]:
    before = {(row.kind, row.name): row for row in old}
    after = {(row.kind, row.name): row for row in new}
    changes = []
    for key in dict.fromkeys([*before, *after]):
        a, b = before.get(key), after.get(key)
        changes.append(
            Change(
                key[1],
                key[0],
                0.0 if a is None else a.ms,
                0.0 if b is None else b.ms,
                0 if a is None else a.calls,
                0 if b is None else b.calls,
            )
        )
    return sorted(changes, key=lambda c: -abs(c.gained_ms))
