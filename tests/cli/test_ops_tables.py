"""What `fuseline bench ops` prints of its records."""

from __future__ import annotations

import io

from rich.console import Console

from fuseline.cli.ops_tables import tables
from fuseline.records import Environment, Record
from fuseline.records.record import Scalar

MACHINE = Environment(
    device="invented",
    clocks=None,
    power_w=None,
    torch="2.11.0",
    cuda=None,
    fuseline="0.1.0",
    commit="0123456789ab",
)


def record(peer: str, metric: str, value: float, **case: Scalar) -> Record:
    place: dict[str, Scalar] = {
        "op": "softmax",
        "dtype": "float32",
        "rows": 8,
        "n": 64,
        "direction": "fw",
        "captured": False,
    }
    return Record.of("ops", {**place, **case}, metric, value, MACHINE, peer=peer)


def printed(*records: Record) -> list[list[str]]:
    """The cells of every line of all tables."""
    told = io.StringIO()
    console = Console(width=150, file=told)
    for table in tables(records):
        console.print(table)
    return [line.split() for line in told.getvalue().splitlines() if line.strip()]


def test_drawn_lengths_are_a_group_of_their_own() -> None:
    listed = record("fuseline", "time_us", 5.0)
    drawn = record("fuseline", "time_us", 7.0, n=1337, drawn=True)
    every = tables([listed, drawn])[1]
    assert list(every.columns[2].cells) == ["fw", "fw, drawn lengths"]


def test_the_host_has_a_table_with_ours_over_torchs() -> None:
    lines = printed(
        record("fuseline", "host_us", 6.0),
        record("eager", "host_us", 8.0),
        record("inductor", "host_us", 40.0),
        record("fuseline", "host_us", 30.0, direction="fwbw"),
        record("eager", "host_us", 25.0, direction="fwbw"),
        record("eager", "host_us", 9.0, op="rope"),
    )
    assert lines[1] == ["op", "dtype", "direction", "fuseline", "eager", "inductor", "ours/eager"]
    assert ["softmax", "float32", "fw", "6.0", "8.0", "40.0", "0.75"] in lines
    assert ["softmax", "float32", "fwbw", "30.0", "25.0", "1.20"] in lines
    assert ["rope", "float32", "fw", "9.0"] in lines


def test_the_worst_of_each_op_comes_first() -> None:
    shares, ratios = {64: 0.9, 128: 0.8}, {64: 0.95, 128: 1.2}
    lines = printed(
        *(record("fuseline", "share_of_copy", share, n=n) for n, share in shares.items()),
        *(record("eager", "paired_speedup", ratio, n=n) for n, ratio in ratios.items()),
    )
    assert ["softmax", "float32", "fw", "0.800", "128", "0.950", "64", "eager"] in lines
    assert not any("host's" in line for line in lines)
