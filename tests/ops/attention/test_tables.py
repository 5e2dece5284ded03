"""Tables: what is written is read, what is near tells of others, and what is kept is there again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fuseline.bench.attention.results import case_of
from fuseline.bench.attention.suites import problems_of
from fuseline.errors import InputError
from fuseline.ops.attention import table_store
from fuseline.ops.attention.distance import distance
from fuseline.ops.attention.fitted import load
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tables import Entry, Table, as_text, read_entries
from fuseline.ops.attention.work import flops
from fuseline.records import read

GPU = torch.device("cuda")
BASE = Problem(GPU, torch.bfloat16, 4, 8, 8, 512, 512, 64, direction="fwbw", causal="bottom_right")


def test_an_entry_is_read_as_it_was_written() -> None:
    problem = replace(BASE, mask="bool", mask_dims="bs", dropout_p=0.1, kv_heads=2, lse=True)
    entry = Entry(problem, {"flash": 12.3456, "cudnn": 10.0})
    data = json.loads(json.dumps(entry.to_json()))
    assert data["times_us"] == {"flash": 12.346, "cudnn": 10.0}
    assert "window_left" not in data, "what is not there is not written"
    assert Entry.from_json(data) == Entry(problem, {"flash": 12.346, "cudnn": 10.0})
    assert entry.fastest == "cudnn"


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = [Entry(replace(BASE, batch=b), {"flash": float(b)}) for b in (1, 2, 3)]
    file = tmp_path / "table.json"
    file.write_text(as_text(entries, {"gpu": "x"}))
    assert read_entries(file) == entries
    assert json.loads(file.read_text())["about"] == {"gpu": "x"}
    assert read_entries(tmp_path / "none.json") == []


def test_a_problem_is_found_whatever_the_number_of_its_gpu() -> None:
    table = Table.of([Entry(BASE, {"flash": 2.0}), Entry(BASE, {"cudnn": 1.0, "flash": 3.0})])
    found = table.find(replace(BASE, device=torch.device("cuda", 1), deterministic=True))
    assert found is not None
    assert found.times_us == {"flash": 3.0, "cudnn": 1.0}, "later entries complete and replace"
    assert table.find(replace(BASE, seqlen_q=513)) is None


def test_both_ends_of_causality_are_one_where_queries_and_keys_are_as_many() -> None:
    table = Table.of([Entry(BASE, {"flash": 2.0})])
    assert table.find(replace(BASE, causal="top_left")) is not None
    assert table.find(replace(BASE, causal="none")) is None
    longer = replace(BASE, seqlen_k=600)
    assert Table.of([Entry(longer, {"flash": 2.0})]).find(replace(longer, causal="top_left")) is None


def test_a_gpus_own_table_lies_over_the_nearest_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nearest = table_store.NEAREST[9, 0]
    (tmp_path / f"{nearest}.json").write_text(
        as_text([Entry(BASE, {"flash": 2.0, "flex": 1.0}), Entry(replace(BASE, batch=2), {"flash": 5.0})], {})
    )
    (tmp_path / "a-gpu.json").write_text(as_text([Entry(BASE, {"flash": 3.0})], {}))
    monkeypatch.setattr(table_store, "SHIPPED", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(table_store, "gpu_name", lambda device: "a-gpu")
    table_store.clear_caches()
    try:
        table = table_store.shipped("a-gpu")
        assert table.find(BASE).times_us == {"flash": 3.0}, "times of two GPUs are not compared"
        assert table.find(replace(BASE, batch=2)).times_us == {"flash": 5.0}
    finally:
        table_store.clear_caches()


def test_distance_counts_doublings() -> None:
    assert distance(BASE, BASE) == 0
    assert distance(BASE, replace(BASE, head_dim=128)) == pytest.approx(1.5)
    assert distance(BASE, replace(BASE, batch=8)) == pytest.approx(0.7)
    assert distance(BASE, replace(BASE, direction="fw")) == pytest.approx(4.0)
    assert distance(BASE, replace(BASE, dtype=torch.float16)) == 0, "16 bits are alike"
    short = replace(BASE, seqlen_q=128, seqlen_k=128)
    assert distance(short, replace(short, dtype=torch.float16)) == 4.0, "but for kernels of short sequences"
    assert distance(BASE, replace(BASE, dtype=torch.float32)) > 1e6
    assert distance(BASE, replace(BASE, causal="top_left")) == 0, "over as many keys as queries both are one"


def test_the_nearest_is_found_within_reach() -> None:
    table = Table.of([Entry(replace(BASE, seqlen_q=n, seqlen_k=n), {"flash": 1.0}) for n in (480, 4096)])
    found = table.nearest(BASE)
    assert found is not None
    assert found[1].problem.seqlen_q == 480
    assert found[0] == pytest.approx(0.14, abs=0.01)
    assert table.nearest(replace(BASE, dtype=torch.float32)) is None
    assert Table().nearest(BASE) is None


def test_an_estimate_is_near_what_was_measured_near() -> None:
    """Times that grow with the work; one candidate is ahead at short lengths and behind at long ones."""

    def times(problem: Problem) -> dict[str, float]:
        work = 10.0 + flops(problem) / 3e8
        lead = 2.0 ** (0.5 * (np.log2(problem.seqlen_k) - 9))
        return {"flash": work, "cudnn": work * lead}

    problems = [
        replace(BASE, seqlen_q=n, seqlen_k=n, batch=max(1, 8192 // n))
        for n in (64, 128, 256, 1024, 2048, 4096)
    ]
    table = Table.of([Entry(problem, times(problem)) for problem in problems])
    for n, fastest in ((96, "cudnn"), (3000, "flash")):
        problem = replace(BASE, seqlen_q=n, seqlen_k=n, batch=max(1, 8192 // n))
        found = table.estimator.estimate(problem, ("flash", "cudnn", "fa2"))
        assert found.keys() == {"flash", "cudnn"}, "nothing is told of what was never measured"
        assert min(found, key=lambda name: found[name]) == fastest
        for name, right in times(problem).items():
            assert found[name] == pytest.approx(right, rel=0.25)
    measured = table.estimator.estimate(problems[3], ("flash",))
    assert measured["flash"] == pytest.approx(times(problems[3])["flash"], rel=0.1)


def test_what_is_kept_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path))
    table_store.clear_caches()
    assert table_store.measured_here("some-gpu").entries == {}
    table_store.save("some-gpu", [Entry(BASE, {"flash": 5.0})])
    file = table_store.save("some-gpu", [Entry(replace(BASE, batch=9), {"math": 7.0})])
    assert torch.__version__.split("+")[0] in file.name, "another torch begins anew"
    assert [p.name for p in file.parent.iterdir() if not p.name.endswith(".lock")] == [file.name]
    table_store.clear_caches()
    assert sorted(
        entry.problem.batch for entry in table_store.measured_here("some-gpu").entries.values()
    ) == [4, 9]
    file.write_text("{")
    table_store.clear_caches()
    with pytest.raises(InputError, match="is not a table of attention times"):
        table_store.measured_here("some-gpu")
    table_store.clear_caches()


def test_shipped_tables_are_tables() -> None:
    for file in table_store.SHIPPED.glob("*.json"):
        entries = read_entries(file)
        # A table that lies over the nearest GPU's may be short.
        assert len(entries) > (100 if file.stem in table_store.NEAREST.values() else 20)
        assert json.loads(file.read_text())["about"]["gpu"] == file.stem, "a GPU finds its table by its name"
        assert all(entry.times_us and min(entry.times_us.values()) > 0 for entry in entries)


def test_shipped_tables_know_the_fastest_of_the_suites_on_record() -> None:
    """What compiles among the candidates and not: the pick in the table is at 0.97 of the best at least."""
    root = Path(__file__).parents[3] / "benchmarks" / "results"
    for name in table_store.NEAREST.values():
        file = table_store.SHIPPED / f"{name}.json"
        times: dict[str, dict[str, float]] = {}
        for record in read(*root.glob(f"attention-{file.stem}.jsonl*")):
            if record.metric == "time_us" and record.peer != "pick" and record.value is not None:
                key = json.dumps(record.case, sort_keys=True)
                times.setdefault(key, {})[record.peer] = record.value
        table = Table.of(read_entries(file))
        known = 0
        for suite in ("short", "long", "decode", "masks"):
            for problem in problems_of(suite, GPU):
                entry = table.find(problem)
                taken = times.get(json.dumps(case_of(problem, suite), sort_keys=True))
                if entry is None or taken is None:
                    continue
                known += 1
                for left_out in ((), ("flex",)):
                    among = {name: t for name, t in entry.times_us.items() if name not in left_out}
                    best = min(t for name, t in taken.items() if name not in left_out)
                    assert taken[min(among, key=lambda name: among[name])] <= best / 0.97, problem
        assert known > 100


def test_shipped_networks_tell_of_any_problem() -> None:
    for file in table_store.SHIPPED.glob("*.npz"):
        fitted = load(file)
        assert fitted is not None
        assert fitted.problems > 1000
        asked = Problem(torch.device("cuda"), torch.bfloat16, 8, 16, 16, 1024, 1024, 64, direction="fwbw")
        told = fitted.estimate(asked, ["cudnn", "flash", "fuseline", "math"])
        assert told.keys() == {"cudnn", "flash", "fuseline", "math"}
        assert all(100 < time_us < 1e5 for time_us in told.values())
