"""What an earlier run into the same folder measured already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuseline.bench.ops.plan import Place
from fuseline.bench.peers import Peer
from fuseline.records import Environment, Record, read_same
from fuseline.records.record import Scalar

Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Earlier:
    """Peers by place, of runs with the same GPU, torch and commit."""

    timed: dict[tuple[Key, bool], set[str]] = field(default_factory=dict)
    refused: dict[Key, set[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, environment: Environment) -> Earlier:
        earlier = cls()
        for record in read_same(file, environment):
            earlier._add(record)
        return earlier

    def wanted(self, place: Place, peers: Sequence[Peer], captured: bool) -> list[Peer]:
        """Those to measure at `place`: none if all are done, else all that were not refused there."""
        key = _key(place.key())
        refused = self.refused.get(key, set())
        able = [peer for peer in peers if peer.name not in refused]
        timed = self.timed.get((key, captured), set())
        return [] if all(peer.name in timed for peer in able) else able

    def _add(self, record: Record) -> None:
        case = record.case
        if not {"op", "dtype", "rows", "n"} <= set(case):
            return
        key = _key(case)
        if record.metric == "skipped":
            self.refused.setdefault(key, set()).add(record.peer)
        elif record.metric == "time_us":
            self.timed.setdefault((key, bool(case.get("captured"))), set()).add(record.peer)


def _key(case: Mapping[str, Scalar]) -> Key:
    return tuple((name, str(case[name])) for name in ("op", "dtype", "rows", "n"))
