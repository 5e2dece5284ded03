"""`fuseline ladder`: plans, complaints, tables."""

from __future__ import annotations

import io
import json

import pytest
import torch
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


def test_times_and_rates_are_those_of_runs_in_turn():
    """The second rung's own 50 ms were taken while something else ran; in turn it took a quarter of 80."""
    first, second = _result("plain PyTorch", 80.0), _result("flash", 50.0, tokens_per_s=1000.0, speedup=4.0)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(results_table([first, second], "cumulative", "gpt2", 120))
    assert console.export_text().splitlines()[-1].split() == ["flash", "20", "2500", "4.00x"]


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


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, x):
        return self.inner(x).square().mean()

def make():
    return Net(), torch.randn(4, 8)

def empty():
    return None
"""


@pytest.fixture
def one_thread():
    """For models this small two wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MODEL)
    return file


def test_a_model_of_ones_own_is_climbed(one_thread, model_file, tmp_path, capsys):
    arguments = ["ladder", "--model", f"{model_file}:make", "--device", "cpu", "--rungs", "fused-adamw,tf32"]
    arguments += ["--steps", "1", "--runs", "2", "--out", str(tmp_path / "out"), "--json"]
    assert run(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert [rung["rung"] for rung in told["rungs"]] == ["the model as it came", "fused-adamw", "tf32"]
    assert told["rungs"][0]["figures"]["samples_per_s"]["value"] > 0
    assert (tmp_path / "out" / "index.html").exists()


def test_a_hugging_face_folder_is_climbed(one_thread, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 32}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    folder = tmp_path / "a-gpt2"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts)).save_pretrained(folder)
    capsys.readouterr()  # its progress bar
    arguments = ["ladder", "--model", str(folder), "--device", "cpu", "--rungs", "fused-adamw"]
    arguments += ["--batch-size", "2", "--seqlen", "16", "--steps", "1", "--runs", "2"]
    assert run([*arguments, "--out", str(tmp_path / "out"), "--json"]) == 0
    first, _ = json.loads(capsys.readouterr().out)["rungs"]
    assert first["preset"] == "GPT2LMHeadModel of a-gpt2"
    rate = 2 * 16 * 1e3 / first["figures"]["iteration_ms"]["value"]
    assert first["figures"]["tokens_per_s"]["value"] == pytest.approx(rate)
    assert first["figures"]["grad_error"]["value"] < 1e-5
    assert run([*arguments, "--seqlen", "64", "--dry-run"]) == 2
    assert "--seqlen 64: the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model", "{file}:empty"], "returned nothing"),
        (["--model", "{file}:mak"], "has no function named 'mak'"),
        (["--model", "{file}"], "names no function"),
        (["--model", "{folder}"], "has no config.json"),
        (["--model", "{file}:make", "--preset", "gpt2"], "--preset is for presets"),
        (["--model", "{file}:make", "--workload", "generate"], "--workload is for presets"),
        (["--model", "{file}:make", "--max-batch", "all"], "--max-batch is for presets"),
        (["--model", "{file}:make", "--seqlen", "8"], "--seqlen is for folders"),
        (["--model", "{file}:make", "--mode", "combination"], "no mode for a model of your own"),
        (["--model", "{file}:make", "--resume"], "may have changed since"),
        (["--model", "{file}:make", "--rungs", "inductr"], "'inductor'"),
    ],
)
def test_what_cannot_be_climbed_gets_one_line(model_file, capsys, arguments, said):
    filled = [a.format(file=model_file, folder=model_file.parent) for a in arguments]
    assert run(["ladder", "--dry-run", "--device", "cpu", *filled]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_dry_run_of_a_model_lists_its_rungs(model_file, capsys, tmp_path):
    arguments = ["--device", "cpu", "--out", str(tmp_path / "out"), "--dry-run", "--json"]
    assert run(["ladder", "--model", f"{model_file}:make", *arguments]) == 0
    lines = {line["name"]: line["reason"] for line in json.loads(capsys.readouterr().out)["rungs"]}
    assert lines["the model as it came"] is None
    assert lines["recorded-step"] == "CUDA graphs need a CUDA device"
    assert {"bf16", "fused-adamw", "accelerate", "inductor"} <= set(lines)
    assert not (tmp_path / "out").exists()


def test_an_unknown_rung_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fuseline.bench.ladder.run", lambda *_: pytest.fail("the ladder began"))
    assert run(["ladder", "--rungs", "bf61", "--device", "cpu"]) == 2
    assert "Did you mean 'bf16'" in capsys.readouterr().err
