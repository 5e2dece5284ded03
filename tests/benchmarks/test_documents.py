"""The tables of README.md and docs/ are those of the committed records."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from fuseline.records import Record, kernel_sources

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def documents() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("documents")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_the_tables_are_drawn_from_the_records(documents: ModuleType) -> None:
    for page in documents.documents():
        text = page.read_text(encoding="utf-8")
        assert documents.rewritten(text) == text, (
            f"{page}: records have changed; run `python benchmarks/documents.py`"
        )


def test_every_table_is_shown_somewhere(documents: ModuleType) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in documents.documents())
    for name in (*documents.TABLES, *documents.SEEDS, *documents.OTHERS):
        assert f"<!-- {name} -->\n" in text, f"no document shows the table {name!r}"


def test_an_unknown_table_is_an_error(documents: ModuleType) -> None:
    with pytest.raises(ValueError, match="There is no table named 'norms'"):
        documents.rewritten("<!-- norms -->\n\n<!-- /norms -->")


def a_record(**changes: object) -> Record:
    case = {"model": "llama-1b", "task": "train", "batch": 4, "seqlen_q": 512, "dtype": "bf16"}
    record = Record(
        suite="step",
        case=case,
        peer="fuseline",
        peer_version=None,
        metric="iteration_ms",
        value=20.0,
        unit="ms",
        low=None,
        high=None,
        n=5,
        device="GPU X",
        clocks=None,
        power_w=None,
        torch="2.13.0+cu130",
        cuda="13.0",
        fuseline="0.1.0",
        commit=None,
        time="2026-01-02T00:00:00+00:00",
    )
    return replace(record, **changes)


def test_a_whole_step_is_compared_with_the_fastest_of_the_others(documents: ModuleType) -> None:
    records = [
        a_record(),
        a_record(peer="fuseline-inductor", value=16.0),
        a_record(peer="eager", value=60.0),
        a_record(peer="inductor", value=24.0),
        a_record(peer="fuseline-inductor", metric="peak_memory_gib", value=3.25),
        a_record(case={"model": "alone", "task": "train"}),  # nobody to compare it with
    ]
    lines = documents.front.steps(records)
    assert lines[2:] == [
        "| llama-1b, training step, 4 x 512, bf16 | 24.00 ms (`torch.compile`) | **16.00 ms** | 1.50x | 3.2 |"
    ]


def test_the_newest_run_of_a_case_counts(documents: ModuleType) -> None:
    later = a_record(value=10.0, time="2026-01-03T00:00:00+00:00")
    lines = documents.front.steps([later, a_record(), a_record(peer="eager", value=15.0)])
    assert "| 15.00 ms (eager) | **10.00 ms** | 1.50x |" in lines[2]


def test_the_source_names_device_version_and_days(documents: ModuleType) -> None:
    records = [a_record(), a_record(time="2026-02-01T10:00:00+00:00")]
    assert documents.source(records) == "*GPU X; torch 2.13.0; measured 2 January 2026 to 1 February 2026.*"


def test_a_combination_stands_before_the_row_that_stood_in_for_it(documents: ModuleType) -> None:
    def row(combination: str, rung: str, ms: float, day: int) -> Record:
        case = {"preset": "gpt2", "batch": 16, "combination": combination, "rung": rung}
        return a_record(suite="ladder", case=case, value=ms, time=f"2026-01-0{day}T00:00:00+00:00")

    anchors = [
        row("anchors", "inductor naive 50257", 50.0, 2),
        row("anchors", "inductor flash 50257", 40.0, 2),
    ]
    lines = documents.seeds.nanogpt(anchors)
    assert "| naive attention | 143 ms | 1.00x | 50.0 ms | 1.00x |" in lines
    assert "| SDPA, flash | 113 ms | 1.27x | 40.0 ms | 1.25x |" in lines
    assert "| SDPA, math | 134 ms | 1.07x | not on record yet | |" in lines
    lines = documents.seeds.nanogpt(
        [*anchors, row("seed-001", "naive", 60.0, 1), row("seed-001", "flash", 30.0, 1)]
    )
    assert "| SDPA, flash | 113 ms | 1.27x | 30.0 ms | 2.00x |" in lines


def test_a_ladder_is_over_torch_alone_where_that_was_timed(documents: ModuleType) -> None:
    def row(rung: str, order: int, **figures: float) -> list[Record]:
        case = {"preset": "gpt2", "mode": "cumulative", "rung": rung, "order": order}
        case |= {"slot": "torch alone", "kept": False} if rung.startswith("torch alone") else {"kept": True}
        figures = {"tokens_per_s": 10.0, "peak_memory_gib": 1.0, **figures}
        return [a_record(suite="ladder", case=case, metric=m, value=v) for m, v in figures.items()]

    climb = [
        *row("plain PyTorch", 0, iteration_ms=100.0),
        *row("graph", 1, iteration_ms=20.0, speedup=5.0),
    ]
    alone = [
        *row("torch alone: inductor", 2, iteration_ms=26.0, speedup=4.0, paired_speedup=0.8),
        *row("torch alone: eager", 3, iteration_ms=50.0, speedup=2.0, paired_speedup=0.4),
    ]
    assert "| the whole step in one CUDA graph | 20.0 | 10 | 5.00x | 1.0 | |" in documents.ladder.ladder(
        climb
    )
    lines = documents.ladder.ladder([*climb, *alone])
    assert "over the best of torch alone | over plain PyTorch" in lines[0]
    assert "| the whole step in one CUDA graph | 20.0 | 10 | 1.25x | 5.00x | 1.0 | |" in lines
    assert "| plain PyTorch (fp32, naive attention) | 100.0 | 10 | 0.25x | 1.00x | 1.0 | |" in lines


def test_the_levers_of_a_generation_are_over_a_compiled_step_too(documents: ModuleType) -> None:
    rates = {"eager": 50.0, "compiled": 200.0, "fused": 250.0}
    records = [
        a_record(
            suite="decode", case={"preset": "llama2-7b", "rung": rung}, metric="tokens_per_s", value=rate
        )
        for rung, rate in rates.items()
    ]
    lines = documents.generation.climb(records)
    assert "| Fuseline's kernels | 250 | 1.25x | 5.00x | | | | |" in lines


def test_a_backend_without_records_is_not_on_record(documents: ModuleType) -> None:
    lines = documents.seeds.compilers("gpt2", [])
    assert "| inductor | 2,640.2 ± 5.8 ms | 51.0% | 1.18x | not on record yet | | |" in lines
    assert "| max-autotune | | | | not on record yet | | |" in lines


def test_users_models_have_a_column_for_everyone(documents: ModuleType) -> None:
    lines = documents.accelerations.acceleration(
        [
            a_record(),
            a_record(peer="fuseline-eager", value=22.0),
            a_record(peer="eager", value=60.0),
            a_record(peer="liger", value=26.0),
            a_record(metric="peak_memory_gib", value=3.25),
            a_record(peer="eager", metric="peak_memory_gib", value=9.0),
            a_record(metric="compile_s", value=12.4),
            a_record(metric="paired_speedup", value=1.3, low=1.25, high=1.35),
        ]
    )
    assert lines[0].startswith(
        "| model | eager, ms | Liger, ms | accelerated, own loop, ms | recorded, ours, ms |"
    )
    assert lines[2] == (
        "| llama-1b, training step, 4 x 512 | 60.00 | 26.00 | 22.00 | 20.00 | 1.30x (1.25 to 1.35) "
        "| 9.0 | 3.2 | 12 |"
    )
    assert lines[3] == "| geometric mean | | | | | **1.30x** | | | |"
    assert documents.accelerations.acceleration([]) == []


def test_lengths_drawn_at_random_have_a_table_of_their_own(documents: ModuleType) -> None:
    usual = [a_record(), a_record(peer="eager", value=60.0)]
    case = {**usual[0].case, "seqlen_q": 411, "drawn": True}
    at_random = [a_record(case=case), a_record(peer="eager", value=70.0, case=case)]
    lines = documents.accelerations.acceleration([*usual, *at_random])
    place = lines.index("The same at lengths drawn at random, at which no kernel was tuned:")
    assert [line for line in lines if "x 411" in line] == [lines[place + 4]]
    assert "70.00" in lines[place + 4]
    front = documents.front.steps([*usual, *at_random])
    assert front == documents.front.steps(usual)


def test_figures_of_older_kernels_are_known_by_the_hashes_of_their_records(documents: ModuleType) -> None:
    softmax = {"op": "softmax", "n": 4}
    today = kernel_sources.hashes("ops", softmax, "fuseline", "time_us", on_gpu=True)
    records = [
        a_record(suite="ops", case=softmax, value=3.0),
        a_record(suite="ops", case={**softmax, "n": 8}, value=5.0, kernels=today),
        a_record(suite="ops", case={**softmax, "n": 16}, value=7.0, kernels={"softmax": "0123456789"}),
        a_record(suite="ops", case=softmax, value=9.0, peer="quack"),
    ]

    def source(suite: str) -> list[Record]:
        assert suite == "ops"
        return records

    def draw(name: str, of: object) -> str:
        values = [f"{r.value}" for r in of("ops") if name == "all" or r.peer == "quack"]  # type: ignore[operator]
        return f"| {' | '.join(values)} |"

    text = "# Page\n## One part\n<!-- all -->\n<!-- /all -->\n## Other\n<!-- theirs -->\n<!-- /theirs -->\n"
    found = [*documents.older.older(text, draw, source)]
    assert [(one.section, one.name, one.figures, one.reason) for one in found] == [
        ("One part", "all", 1, "changed since: softmax"),
        ("One part", "all", 1, documents.older.BEFORE_HASHES),
    ]
    lines = documents.older.summary(found)
    assert lines[2] == "| [One part](#one-part) | changed since: softmax | 1 |"
    assert "today's kernels" in documents.older.summary([])[0]
