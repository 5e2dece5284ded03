"""The small suite on a CPU: what is recorded, and that the peers compute the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuseline.bench.attention import small
from fuseline.bench.attention.small_layers import PEERS, build
from fuseline.cli.layer_tables import tables
from fuseline.records import read
from fuseline.report.sections import attention_small
from fuseline.report.selection import Shelf

CPU = torch.device("cpu")


@pytest.mark.parametrize("form", PEERS)
def test_peers_are_one_layer(form: str) -> None:
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    layers = [build(form, peer, 16, 4, CPU, torch.float64, seed=3) for peer in PEERS[form]]
    first = layers[0].run(x)
    assert first.std() > 0.01
    for layer in layers[1:]:
        torch.testing.assert_close(layer.run(x), first)
        assert [p.shape for p in layer.leaves] == [p.shape for p in layers[0].leaves]


def test_records_every_peer_and_direction(tmp_path: Path) -> None:
    bench = small.SmallBench(CPU, batch=2, heads=2, lengths=(3, 4), embed_dims=(16,), rounds=2)
    seen: list[tuple[int, int]] = []
    records, left = small.run_small(bench, tmp_path, lambda now, done, total: seen.append((done, total)))
    assert left == 0
    assert seen == [(now, 6) for now in range(7)]
    assert read(tmp_path / "attention.jsonl") == records
    times = {
        (r.case["form"], r.case["seqlen_q"], r.peer, r.case["direction"])
        for r in records
        if r.metric == "time_us" and r.value is not None and r.value > 0
    }
    assert times == {
        (form, length, peer, direction)
        for form, peers in PEERS.items()
        if form != "bar"
        for length in (3, 4)
        for peer in peers
        for direction in small.DIRECTIONS
    }
    ratios = [r for r in records if r.metric == "paired_speedup"]
    assert {r.peer for r in ratios} == {"aten", "fuseline", "sdpa", "mha", "eager"}
    assert all(r.case["baseline"] == "python" for r in ratios)
    assert not [r for r in records if r.metric == "skipped"]


def test_bar_has_its_own_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = small.SmallBench(torch.device("cuda"), forms=("bar",), every=9).cases()
    assert len(cases) == 12
    assert str(cases[5]) == "bar tf32 B=8 H=8 S=16 E=512"
    named = small.SmallBench(torch.device("cuda"), only=("tf32 B=8 H=8", "E=64")).cases()
    assert {str(case) for case in named} >= {"bar tf32 B=8 H=8 S=16 E=512", "bar bfloat16 B=8 H=4 S=10 E=64"}
    assert all("tf32 B=8 H=8" in str(case) or "E=64" in str(case) for case in named)
    assert not small.SmallBench(CPU, forms=("bar",)).cases()
    bench = small.SmallBench(CPU, rounds=1)
    monkeypatch.setattr(small.SmallBench, "cases", lambda bench: [small.Case("bar", "tf32", 2, 2, 3, 16)])
    compiled: list[object] = []

    def compile_here(function: Callable[..., object], *, mode: str | None, **_: object) -> object:
        compiled.append(mode)
        return function

    monkeypatch.setattr(torch, "compile", compile_here)
    records, _ = small.run_small(bench, tmp_path, lambda now, done, total: None)
    assert {r.case["dtype"] for r in records} == {"tf32"}
    assert {r.case["baseline"] for r in records if r.metric == "paired_speedup"} == {"sdpa"}
    assert compiled == [None, "max-autotune-no-cudagraphs"]
    assert {r.peer for r in records if r.metric == "time_us"} == set(PEERS["bar"])


def test_a_sample_has_as_many_calls_as_its_seconds_hold() -> None:
    def count(call: small.Call, seconds: float) -> int:
        return small._calls_a_sample(call, torch.device("cpu"), seconds)

    assert 2 <= count(lambda: time.sleep(1e-3), 5e-3) <= 5
    assert count(lambda: time.sleep(1e-3), 1e-4) == 1
    assert count(lambda: None, 1.0) == small.MOST_CALLS


def test_names_an_unknown_form() -> None:
    with pytest.raises(ValueError, match="shared"):
        small.SmallBench(CPU, forms=("share",))


def test_goes_on_where_its_budget_ended(tmp_path: Path) -> None:
    bench = small.SmallBench(
        CPU, batch=2, heads=2, lengths=(3, 4), embed_dims=(16,), forms=("shared",), rounds=1
    )

    def run(**changed: object) -> tuple[list[int], int]:
        records, left = small.run_small(replace(bench, **changed), tmp_path, lambda now, done, total: None)
        return sorted({int(record.case["seqlen_q"]) for record in records}), left

    assert run(budget_seconds=0.0) == ([], 2)
    assert run(every=2) == ([3], 0)
    assert run(resume=True, budget_seconds=0.0) == ([], 1)
    assert run(resume=True) == ([4], 0)
    assert run(resume=True) == ([], 0)


def test_lengths_drawn_at_random_stand_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "DRAWN_WIDTH", 16)
    bench = small.SmallBench(
        CPU, batch=2, heads=2, lengths=(8,), embed_dims=(16,), forms=("full",), rounds=2, drawn=2
    )
    usual, *at_random = bench.cases()
    assert [usual.drawn, *(case.drawn for case in at_random)] == [False, True, True]
    assert all(8 < case.length <= 128 for case in at_random)
    records, _ = small.run_small(bench, tmp_path, lambda now, done, total: None)
    marked = {(r.case["seqlen_q"], r.case.get("drawn")) for r in records}
    assert marked == {(8, None), *((case.length, True) for case in at_random)}
    titles = [section.title for section in attention_small.sections(Shelf(records))]
    title = "Small attention layers, full, float32"
    assert titles == [title, f"{title}, lengths drawn at random"]
    (table,) = tables(records)
    assert list(table.columns[0].cells) == ["full"] * 2 + ["full, drawn lengths"] * 2
