"""The tables of `fuseline bench ops`: the worst of each op, then every case in one line, then the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from fuseline.records import Record

OURS = "fuseline"
SHARES = ("share_of_floor", "share_of_copy", "tflops")  # what is shown of each peer: the first there is

Row = dict[str, dict[str, "Record"]]
"""By peer, then by metric."""


def tables(records: Sequence[Record]) -> list[Table]:
    places = _places(records)
    made = (_worst(places), _all(places), _host(records), _seed(records))
    return [table for table in made if table is not None]


def _places(records: Sequence[Record]) -> dict[tuple[str, ...], Row]:
    """By op, dtype, direction, rows and n."""
    places: dict[tuple[str, ...], Row] = {}
    for record in records:
        if "direction" in record.case and record.metric != "host_us" and "section" not in record.case:
            captured = " captured" if record.case["captured"] else ""
            captured += ", drawn lengths" if record.case.get("drawn") else ""
            op, dtype, direction, rows, n = (
                str(record.case[key]) for key in ("op", "dtype", "direction", "rows", "n")
            )
            row = places.setdefault((op, dtype, direction + captured, rows, n), {})
            row.setdefault(record.peer, {})[record.metric] = record
    return places


def _worst(places: dict[tuple[str, ...], Row]) -> Table | None:
    """For each op, dtype and direction the lowest share, the lowest ratio to the best peer, and where."""
    if not places:
        return None
    table = Table(title="The worst of each op", box=box.SIMPLE)
    for heading in ("op", "dtype", "direction"):
        table.add_column(heading)
    for heading in ("lowest share", "at n", "best peer / ours", "at n", "peer", "error / eager's"):
        table.add_column(heading, justify="right")
    kinds: dict[tuple[str, ...], list[tuple[str, Row]]] = {}
    for (op, dtype, direction, _, n), row in places.items():
        kinds.setdefault((op, dtype, direction), []).append((n, row))
    for kind, rows in kinds.items():
        shares = [(share, n) for n, row in rows if (share := _share(row.get(OURS, {}))) is not None]
        ratios = [(*best, n) for n, row in rows if (best := _best_peer(row)) is not None]
        errors = [ratio for _, row in rows if (ratio := _error_ratio(row)) is not None]
        cells = [f"{min(shares)[0]:.3f}", min(shares)[1]] if shares else ["", ""]
        cells += [f"{min(ratios)[0]:.3f}", min(ratios)[2], min(ratios)[1]] if ratios else ["", "", ""]
        table.add_row(*kind, *cells, f"{max(errors):.2f}" if errors else "")
    return table


def _all(places: dict[tuple[str, ...], Row]) -> Table | None:
    peers = list(dict.fromkeys(peer for row in places.values() for peer in row))
    if not peers:
        return None
    table = Table(
        title="Share of the ceiling (TFLOP/s of products), and the best peer's time over ours", box=box.SIMPLE
    )
    for heading in ("op", "dtype", "direction"):
        table.add_column(heading)
    for heading in ("rows", "n", "us", *peers, "best/ours"):
        table.add_column(heading, justify="right")
    before = None
    for (op, dtype, direction, rows, n), row in places.items():
        if before not in (None, (op, dtype, direction)):
            table.add_section()
        before = op, dtype, direction
        first = row.get(OURS) or next(iter(row.values()))
        best = _best_peer(row)
        shares = [_share(row.get(peer, {})) for peer in peers]
        table.add_row(
            *(op, dtype, direction, rows, n, _written(first.get("time_us"), "{:.1f}")),
            *("" if share is None else f"{share:.3f}" for share in shares),
            "" if best is None else f"{best[0]:.3f}",
        )
    return table


def _host(records: Sequence[Record]) -> Table | None:
    """What an eager call costs the host: microseconds of everyone, and ours over torch's own."""
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    for record in records:
        if record.metric == "host_us" and record.value is not None:
            place = tuple(str(record.case[key]) for key in ("op", "dtype", "direction"))
            rows.setdefault(place, {})[record.peer] = record.value
    if not rows:
        return None
    peers = list(dict.fromkeys(peer for row in rows.values() for peer in row))
    table = Table(title="The host's microseconds of an eager call", box=box.SIMPLE)
    for heading in ("op", "dtype", "direction"):
        table.add_column(heading)
    for heading in (*peers, "ours/eager"):
        table.add_column(heading, justify="right")
    for place, row in rows.items():
        ratio = f"{row[OURS] / row['eager']:.2f}" if {OURS, "eager"} <= row.keys() else ""
        table.add_row(*place, *(f"{row[peer]:.1f}" if peer in row else "" for peer in peers), ratio)
    return table


def _seed(records: Sequence[Record]) -> Table | None:
    """The homework's shapes: composition over ours, the fastest of the others over ours, launches."""
    rows: dict[tuple[str, ...], Row] = {}
    for record in records:
        if record.case.get("section") == "seed" and record.metric != "skipped":
            op, masked = str(record.case["op"]), record.case.get("mask")
            direction = f"{record.case['direction']}{', in a graph' if record.case['captured'] else ''}"
            shape = (str(record.case[key]) for key in ("rows", "n"))
            place = (f"{op}, {masked}" if masked else op, direction, *shape)
            rows.setdefault(place, {}).setdefault(record.peer, {})[record.metric] = record
    if not rows:
        return None
    table = Table(title="At the homework's shapes", box=box.SIMPLE)
    for heading in ("op", "direction"):
        table.add_column(heading)
    for heading in (
        "rows",
        "n",
        "ours, us",
        "composed, us",
        "composed/ours",
        "fastest/ours",
        "of",
        "launches",
        "replaced",
    ):
        table.add_column(heading, justify="right")
    for place, row in rows.items():
        ours, composed = (row.get(peer, {}) for peer in (OURS, "composed"))
        best = _best_peer({peer: found for peer, found in row.items() if peer != "composed"})
        table.add_row(
            *place,
            _written(ours.get("time_us"), "{:.1f}"),
            _written(composed.get("time_us"), "{:.1f}"),
            _written(composed.get("paired_speedup"), "{:.2f}"),
            *((f"{best[0]:.2f}", best[1]) if best else ("", "")),
            _written(ours.get("launches"), "{:.0f}"),
            _written(composed.get("launches"), "{:.0f}"),
        )
    return table


def _share(of_peer: dict[str, Record]) -> float | None:
    found = next((of_peer[metric] for metric in SHARES if metric in of_peer), None)
    return None if found is None else found.value


def _best_peer(row: Row) -> tuple[float, str] | None:
    """The lowest ratio of a peer's time to ours, and whose it is."""
    ratios = [
        (record.value, peer)
        for peer, metrics in row.items()
        if (record := metrics.get("paired_speedup")) is not None and record.value is not None
    ]
    return min(ratios, default=None)


def _error_ratio(row: Row) -> float | None:
    ours, eager = (row.get(peer, {}).get("error") for peer in (OURS, "eager"))
    if ours is None or eager is None or ours.value is None or not eager.value:
        return None
    return ours.value / eager.value


def _written(record: Record | None, form: str) -> str:
    return "" if record is None or record.value is None else form.format(record.value)
