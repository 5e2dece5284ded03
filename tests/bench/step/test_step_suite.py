"""The suite of whole steps: equal steps have equal times and errors; wrong requests are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuseline.bench.step import StepBench, find_cases, run
from fuseline.bench.step.contenders import FORMS
from fuseline.cli.main import run as command
from fuseline.errors import InputError
from fuseline.records import read

# A model with nanoGPT's interface and ours inside.
MODEL = """
import torch
from fuseline.models.gpt import GPT as Ours
from fuseline.models.gpt_config import GPTConfig as OurConfig

class GPTConfig:
    def __init__(self, **given):
        self.__dict__.update(given)

class GPT(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        ours = OurConfig(c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd, c.dropout, c.bias)
        made = Ours(ours)
        self.transformer, self.lm_head, self._made = made.transformer, made.lm_head, [made]
    def forward(self, tokens, targets):
        return None, self._made[0](tokens, targets)
    def configure_optimizers(self, decay, rate, betas, device):
        return torch.optim.AdamW(self.parameters(), lr=rate, betas=betas, weight_decay=decay)
"""


def test_records_of_a_step(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    cases = find_cases(["tiny"], batch_size=2, seqlen=16, precision="fp32")
    bench = StepBench(
        torch.device("cpu"), cases, ("fuseline-eager", "fuseline", "nanogpt-eager"), 3, 1, nanogpt=model
    )
    records = run(bench, tmp_path / "step.jsonl", lambda case, peer, phase: None)
    found = {(r.peer, r.metric): r.value for r in records}
    assert found["fuseline", "skipped"] is None
    for peer in ("fuseline-eager", "nanogpt-eager"):
        assert found[peer, "loss_error"] < 1e-6
        assert found[peer, "grad_error"] < 1e-5
        assert found[peer, "tokens_per_s"] == pytest.approx(2 * 16 / found[peer, "iteration_ms"] * 1e3)
    ratio = found["nanogpt-eager", "iteration_ms"] / found["fuseline-eager", "iteration_ms"]
    assert found["fuseline-eager", "paired_speedup"] == pytest.approx(ratio, rel=0.5)
    assert len((tmp_path / "step.jsonl").read_text().splitlines()) == len(records)


def test_a_llama_is_timed_without_nanogpt_and_fp8_only_beside_bf16(tmp_path: Path) -> None:
    cases = find_cases(["llama-tiny"], batch_size=2, seqlen=16, precision="fp32")
    peers = ("fuseline-eager", "fuseline-fp8", "nanogpt-eager")
    bench = StepBench(torch.device("cpu"), cases, peers, 2, 1)
    records = run(bench, tmp_path / "step.jsonl", lambda case, peer, phase: None)
    reasons = {r.peer: r.case["reason"] for r in records if r.metric == "skipped"}
    assert reasons == {
        "fuseline-fp8": "fp8 stands beside bf16, and this step is in fp32",
        "nanogpt-eager": "nanoGPT is no Llama",
    }
    found = {r.metric: r.value for r in records if r.peer == "fuseline-eager"}
    assert found["loss_error"] < 1e-6
    assert found["grad_error"] < 1e-5
    with pytest.raises(InputError, match="fuseline-fp8"):
        find_cases(["tiny"], precision="fp8")


def test_a_step_in_fp8_says_which_layers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path))
    monkeypatch.setattr("fuseline.bench.step.suite.why_not", lambda *of_what: None)
    monkeypatch.setattr("fuseline.acceleration.precision.why_no_fp8", lambda device: None)
    monkeypatch.setitem(FORMS, "fuseline-fp8", replace(FORMS["fuseline-fp8"], execution="eager"))
    cases = find_cases(["tiny"], batch_size=2, seqlen=16, precision="bf16")
    bench = StepBench(torch.device("cpu"), cases, ("fuseline-fp8",), 1, 1)
    records = run(bench, tmp_path / "out.jsonl", lambda case, peer, phase: None)
    (found,) = [r for r in records if r.metric == "layers_in_fp8"]
    assert found in read(tmp_path / "out.jsonl")
    layers = found.case["decided"].split("; ")
    assert sum(int(line.split()[0]) for line in layers) == found.n
    assert sum(int(line.split()[0]) for line in layers if line.endswith(": fp8")) == found.value


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tiny takes 1 to"):
        find_cases(["tiny"], seqlen=10**6)
    with pytest.raises(InputError, match="preset"):
        find_cases(["gpt9"])
    cases = find_cases(["tiny"], batch_size=1, seqlen=8, precision="fp32")
    with pytest.raises(InputError, match="Unknown peers: nobody"):
        StepBench(torch.device("cpu"), cases, ("nobody",))
    empty = tmp_path / "model.py"
    empty.write_text("x = 1")
    for file, told in ((empty, "no GPT and GPTConfig"), (tmp_path / "none.py", "there is no such file")):
        with pytest.raises(InputError, match=told):
            StepBench(torch.device("cpu"), cases, nanogpt=file)


def test_lengths_drawn_at_random_stand_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "step", "--device", "cpu", "--presets", "tiny", "--peers", "fuseline-eager"]
    short = ["--batch-size", "1", "--rounds", "2", "--steps", "1", "--out", str(tmp_path)]
    assert command([*arguments, *short, "--drawn", "1"]) == 0
    (usual, drawn) = find_cases(["tiny"], batch_size=1, precision="fp32", drawn=1)
    listed, at_random = capsys.readouterr().out.split("One training step, lengths drawn at random")
    assert f"tiny 1 x {usual.seqlen}" in listed
    assert f"tiny {drawn.batch} x {drawn.seqlen}" in at_random
    assert f"tiny 1 x {usual.seqlen}" not in at_random
    marked = {(r.case["seqlen_q"], r.case.get("drawn")) for r in read(tmp_path / "step.jsonl")}
    assert marked == {(usual.seqlen, None), (drawn.seqlen, True)}
    assert command([*arguments, "--seqlen", "16", "--dry-run"]) == 0
    assert "drawn" not in capsys.readouterr().out
