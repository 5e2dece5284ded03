"""`fuseline ladder`: plans, complaints, tables."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from fuseline.bench.ladder.result import Figure, Measurement, RungResult
from fuseline.bench.ladder.spec import baseline
from fuseline.cli.ladder_view import results_table
from fuseline.cli.main import run


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--rungs", "flahs"], "'flash'"),
        (["--rungs", "bf16,sed-003"], "'seed-003'"),
        (["--mode", "along"], "'alone'"),
        (["--budget", "soon"], "not a duration"),
        (["--preset", "gpt3"], "'gpt2'"),
        (["--preset", "tiny", "--rungs", "anchors"], "--preset gpt2"),
        (["--max-batch", "some"], "--max-batch"),
        (["--workload", "generate", "--preset", "llama-tinny"], "'llama-tiny'"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(capsys, arguments, said):
    assert run(["ladder", "--dry-run", "--device", "cpu", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_dry_run_lists_rungs_and_reasons_and_writes_nothing(capsys, tmp_path):
    out = tmp_path / "out"
    assert run(["ladder", "--dry-run", "--json", "--device", "cpu", "--out", str(out)]) == 0
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["rungs"]}
    assert lines["plain PyTorch"]["reason"] is None
    assert "CUDA" in lines["graph"]["reason"]
    assert not out.exists()


def _result(name, ms, **figures):
    measured = {"iteration_ms": Figure(ms, ms, ms, 5)} | {k: Figure(v) for k, v in figures.items()}
    return RungResult(
        name,
        "slot",
        "lever",
        "anchor",
        0,
        baseline("gpt2"),
        Measurement(figures=measured),
        None,
        True,
        "anchors",
    )


def test_the_table_fits_80_columns_and_shows_the_reference_beside():
    full = _result(
        "inductor reduce-overhead 50304",
        36.251,
        tokens_per_s=451999,
        speedup=12.34,
        paired_speedup=1.234,
        mfu=0.391,
        peak_memory_gib=12.9,
        max_batch=97,
        grad_error=0.0123,
        data_wait_share=0.001,
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(results_table([full], "anchors", "gpt2", 80))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for said in (
        "inductor reduce-overhead 50304",
        "36.25",
        "452K",
        "12.34x",
        "39.1%",
        "12.9",
        "H100 ms",
    ):
        assert said in text


def test_a_wide_terminal_gets_every_column():
    console = Console(width=120, record=True, file=io.StringIO())
    result = _result("flash", 5.0, data_wait_share=0.25, max_batch=97, grad_error=0.0123, tokens_per_s=9e4)
    console.print(results_table([result], "cumulative", "gpt2", 120))
    text = console.export_text()
    assert all(said in text for said in ("25.0%", "97", "1e-02", "90000"))


def test_columns_that_hold_nothing_are_left_out():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(results_table([_result("flash", 5.0)], "cumulative", "gpt2", 80))
    text = console.export_text()
    assert "MFU" not in text
    assert "GiB" not in text
