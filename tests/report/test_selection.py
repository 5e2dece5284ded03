"""Of several records of one figure the newest is shown; nothing is shown twice and nothing lost."""

from __future__ import annotations

from dataclasses import replace

from fuseline.report.selection import Shelf, grouped


def at(record, minute, **changes):
    case = {**record.case, **changes.pop("case", {})}
    return replace(record, time=f"2026-11-20T11:{minute:02}:00+00:00", case=case, **changes)


def of(records, rung, metric):
    return next(r for r in records if r.case.get("rung") == rung and r.metric == metric)


def test_the_newest_of_a_figure_wins_whatever_the_order_of_files(ladder_records):
    old = of(ladder_records, "flash", "iteration_ms")
    new = at(old, 5, value=50.0)
    for records in ([old, new], [new, old]):
        shelf = Shelf(records)
        assert [r.value for r in shelf.records] == [50.0]
        assert shelf.superseded == 1


def test_what_was_said_afterwards_does_not_make_another_figure(ladder_records):
    old = of(ladder_records, "flash", "iteration_ms")
    new = at(old, 5, case={"kept": False, "order": 99, "baseline": "something else"})
    assert Shelf([old, new]).records == [new]


def test_another_device_torch_or_peer_version_is_another_figure(all_records):
    record = next(r for r in all_records if r.peer == "inductor" and r.metric == "time_us")
    others = [replace(record, device="B"), replace(record, torch="9"), replace(record, peer_version="9")]
    assert len(Shelf([record, *others]).records) == 4


def test_a_rung_run_again_in_another_way_takes_nothing_from_before(ladder_records):
    flash = [r for r in ladder_records if r.case["rung"] == "flash" and r.case["mode"] == "cumulative"]
    again = at(of(ladder_records, "flash", "iteration_ms"), 5, case={"dtype": "tf32"})
    assert len(flash) > 5
    assert Shelf([*flash, again]).records == [again]


def test_a_largest_batch_tried_later_belongs_to_its_rung(ladder_records):
    time = of(ladder_records, "flash", "iteration_ms")
    batch = at(of(ladder_records, "flash", "max_batch"), 9, case={"verified": False})
    assert Shelf([time, batch]).records == [time, batch]


def test_records_are_taken_once(ladder_records):
    shelf = Shelf(ladder_records)
    taken = shelf.take(lambda r: r.metric == "mfu")
    assert taken
    assert shelf.take(lambda r: r.metric == "mfu") == []
    assert len(shelf.rest()) == len(shelf.records) - len(taken)


def test_groups_come_in_the_order_of_their_first(ladder_records):
    groups = grouped(ladder_records, lambda r: str(r.case["mode"]))
    assert list(groups) == ["cumulative", "combination", "anchor"]
    assert sum(map(len, groups.values())) == len(ladder_records)
