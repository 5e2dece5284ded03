"""The records of a page: the newest of each figure, handed out to sections so that none is left unshown."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from fuseline.records import Record

Group = TypeVar("Group", bound=Hashable)

# What makes a rung of a ladder the same rung when it is run again, and what it then ran as: what it stands on
# may have come out differently.
_RUNG = ("model", "preset", "mode", "combination", "rung", "batch", "seqlen_q")
_RAN_AS = ("dtype", "backend", "vocab", "optimizer", "kernels", "execution", "dropout", "bias")
# What is said of any other run after the fact.
_SAID_AFTERWARDS = frozenset(
    {"order", "kept", "reason", "names", "decided", "baseline", "note", "text", "overflow", "models"}
)


class Shelf:
    """Records, each figure's newest. `take` hands them out; what nobody took is the `rest`."""

    def __init__(self, records: Sequence[Record]) -> None:
        newest: dict[Hashable, Record] = {}
        runs: dict[Hashable, Hashable] = {}
        for record in sorted(records, key=lambda r: r.time):
            newest[(_run(record), record.metric)] = record
            if record.metric in ("iteration_ms", "skipped"):
                runs[_run(record)] = _ran_as(record)
        # A rung that was run again in another way takes nothing over from the way it ran before.
        current = {id(r) for r in newest.values() if runs.get(_run(r), _ran_as(r)) == _ran_as(r)}
        self.records = [r for r in records if id(r) in current]
        self.superseded = len(records) - len(self.records)
        self._taken: set[int] = set()

    def take(self, wanted: Callable[[Record], bool]) -> list[Record]:
        """The records that are `wanted` and that no one took before, in their order in the files."""
        found = [r for r in self.records if id(r) not in self._taken and wanted(r)]
        self._taken.update(map(id, found))
        return found

    def rest(self) -> list[Record]:
        return self.take(lambda record: True)


def grouped(records: Iterable[Record], key: Callable[[Record], Group]) -> dict[Group, list[Record]]:
    """Records by `key`, in the order in which the keys first appear."""
    groups: dict[Group, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _run(record: Record) -> Hashable:
    """What was run, on what."""
    if record.suite == "ladder" and "rung" in record.case:
        case = tuple((key, str(record.case.get(key))) for key in _RUNG)
    else:
        case = tuple(sorted((k, str(v)) for k, v in record.case.items() if k not in _SAID_AFTERWARDS))
    version = None if record.peer == "fuseline" else record.peer_version
    return record.suite, case, record.peer, version, record.device, record.torch


def _ran_as(record: Record) -> Hashable:
    return tuple(str(record.case.get(key)) for key in _RAN_AS)
