"""The decode suite: every contender goes on with the same tokens, and the records say what was run."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline import report
from fuseline.bench.compiling import Compilers, Task
from fuseline.bench.decode import DecodeBench, contenders, left, run
from fuseline.bench.decode.contenders import (
    Compiled,
    CompiledTransformers,
    contender,
)
from fuseline.bench.decode.plain_torch import in_plain_torch, tinygemm_weight
from fuseline.cli.main import run as command
from fuseline.errors import InputError
from fuseline.models.gpt import GPT, GPTConfig
from fuseline.models.heads import whole_sequence
from fuseline.models.llama import Llama, preset
from fuseline.nn import QuantLinear
from fuseline.quant import Format, quantize, quantize_linear
from fuseline.records import read

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [9, 8, 1]]


def written(made: Any, count: int = 6) -> list[list[int]]:
    made.begin(PROMPTS)
    rows = []
    for _ in range(count):
        rows.append(torch.as_tensor(made.advance()).flatten().tolist())
    made.close()
    return rows


@pytest.fixture
def model() -> Llama:
    torch.manual_seed(0)
    model = Llama(preset("llama-tiny")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def test_all_write_the_same(model: Llama) -> None:
    options: dict[str, Any] = {"batch": 2, "capacity": 32}
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    expected = written(contender("fuseline", model, **options))
    assert written(contender("eager", model, **options)) == expected
    assert written(Compiled(in_plain_torch(model), **options, backend="eager")) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations are not ours to mend
        pytest.importorskip("transformers", reason="needs transformers to compare with")
        assert written(contender("transformers", model, **options)) == expected
        compiled = CompiledTransformers(model, **options, backend=count)
        assert written(compiled) == expected
        assert graphs


def test_int8_is_compared_in_the_same_integers(model: Llama) -> None:
    quantize(model, "int8")
    options: dict[str, Any] = {"batch": 2, "capacity": 32}
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    expected = written(contender("fuseline", model, **options))
    plain = in_plain_torch(model)
    assert not any(isinstance(layer, QuantLinear) for layer in plain.modules())
    assert written(Compiled(plain, **options, backend="eager")) == expected
    for format, reason in (("int4", "is compared on a GPU"), ("fp8", "not in fp8")):
        again = Llama(model.config)
        quantize(again, format, group_size=32 if format == "int4" else 0)
        with pytest.raises(InputError, match=reason):
            in_plain_torch(again)


@pytest.mark.parametrize("zero_points", [False, True])
def test_int4_is_compared_in_the_same_integers(zero_points: bool) -> None:
    """The pairs and what scales and shifts a group, as tinygemm's: scale * (q - 8) + added."""
    plain = torch.nn.Linear(256, 24)
    layer, _ = quantize_linear(plain, Format("int4", 64, zero_points=zero_points))
    pairs_NP, groups_GN2 = tinygemm_weight(layer)
    integers_NK = torch.stack((pairs_NP >> 4, pairs_NP & 15), -1).flatten(1).float() - 8
    scales_NK, added_NK = (groups_GN2[..., i].T.float().repeat_interleave(64, 1) for i in range(2))
    assert pairs_NP.dtype is torch.uint8
    assert torch.allclose(scales_NK * integers_NK + added_NK, layer.dequantized(), atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_quantized_models_of_others_write_the_same_on_a_gpu(format: str) -> None:
    torch.manual_seed(0)
    model = (
        Llama(replace(preset("llama-tiny"), embed_dim=256, ffn_dim=512, head_dim=64))
        .to("cuda", torch.bfloat16)
        .eval()
    )
    quantize(model, format, **({"group_size": 128} if format == "int4" else {}))
    options: dict[str, Any] = {"batch": 2, "capacity": 32}
    expected = contender("fuseline", model, **options)
    compared = Compiled(in_plain_torch(model), **options, backend="eager")
    with torch.no_grad():
        tokens = torch.tensor(PROMPTS, device="cuda")
        ours, theirs = (
            m.logits(m.hidden(tokens, None, whole_sequence)).float() for m in (expected.model, compared.model)
        )
    assert (ours - theirs).norm() < 3e-2 * ours.norm()


def test_what_compiles_is_compiled_beforehand_by_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all positions, in its own format and batch."""
    order: list[str] = []

    def compile_here(self: Compilers, tasks: list[Task], *_: object) -> None:
        for task in tasks:
            problem = task.arguments[1]
            order.append(f"compiled {problem.peer} {problem.format} {problem.batch}")
            assert task.room > 2 * 2**30
            task.function(*task.arguments)

    monkeypatch.setattr(Compilers, "run", compile_here)
    monkeypatch.setattr(contenders, "Compiled", partial(Compiled, backend="eager"))
    peers = ("fuseline", "gptfast")
    bench = DecodeBench(CPU, "llama-tiny", (1, 2), (40, 50), 64, ("int8",), peers, steps=2, runs=2, jobs=2)
    run(bench, tmp_path, lambda now, *_: order.append(now))
    assert order[:2] == [f"compiled gptfast {of}" for of in ("int8 1", "int8 2")]
    assert order[2] == "fuseline int8, 1 rows"
    assert order.count("gptfast int8, 2 rows") == 2


def test_a_gpt_is_compared_too() -> None:
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(64, 37, 1, 2, 16, norm="fuseline")).eval()
    options: dict[str, Any] = {"batch": 2, "capacity": 32}
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    expected = written(contender("fuseline", gpt, **options))
    assert written(contender("eager", gpt, **options)) == expected
    with pytest.raises(InputError, match="only Llamas"):
        contender("transformers", gpt, **options)


def test_records_say_what_was_run(tmp_path: Path) -> None:
    bench = DecodeBench(
        CPU,
        "llama-tiny",
        (1, 2),
        (40,),
        64,
        ("fp32", "int8"),
        ("fuseline", "eager"),
        steps=2,
        runs=3,
        drawn=1,
    )
    seen: list[str] = []
    records = run(bench, tmp_path, lambda now, done, total: seen.append(now))
    assert read(tmp_path / "decode.jsonl") == records
    assert seen[-1] == "done"
    assert {(r.peer, r.case["format"]) for r in records} == {
        ("fuseline", "fp32"),
        ("fuseline", "int8"),
        ("eager", "fp32"),
    }
    rates = [r for r in records if r.metric == "tokens_per_s"]
    times = [r for r in records if r.metric == "iteration_ms"]
    for rate, time in zip(rates, times, strict=True):
        assert rate.value == pytest.approx(int(str(rate.case["batch"])) * 1e3 / (time.value or 0))
        assert (rate.low or 0) <= (rate.value or 0) <= (rate.high or 0)
        assert rate.n == 3
    at_random = {(r.peer, r.case["batch"], r.case["format"]) for r in rates if r.case.get("drawn")}
    assert at_random == {("fuseline", 1, "fp32"), ("eager", 1, "fp32")}
    page = report.build(records, tmp_path).read_text()
    assert "Positions drawn at random, at which no kernel was tuned" in page
    assert "Decoding: llama-tiny" in page
    assert "tokens/s with 1 row in" in page


def test_what_a_budget_leaves_out_a_later_run_takes_up(tmp_path: Path) -> None:
    bench = DecodeBench(CPU, "llama-tiny", (1, 2), (40,), 64, ("fp32",), ("fuseline",), steps=2, runs=3)
    assert run(replace(bench, budget_seconds=1e-9), tmp_path, lambda *_: None) == []
    assert left(bench, tmp_path) == bench.problems()
    run(replace(bench, batches=(1,)), tmp_path, lambda *_: None)
    assert [problem.batch for problem in left(bench, tmp_path)] == [2]
    again = run(replace(bench, resume=True), tmp_path, lambda *_: None)
    assert {record.case["batch"] for record in again} == {2}
    assert not left(bench, tmp_path)
    assert left(replace(bench, preset="llama-160m"), tmp_path)


def test_what_cannot_be_measured_is_refused_or_said(tmp_path: Path) -> None:
    for options, message in (
        ({"peers": ("vllm",)}, "no peer named 'vllm'"),
        ({"formats": ("int3",)}, "no format named 'int3'"),
        ({"batches": (1, 0)}, "0 rows leave nothing"),
        ({"positions": (500,)}, "Position 500 of 512"),
        ({"positions": (30,)}, "Position 30 of 512"),
    ):
        with pytest.raises(InputError, match=message):
            DecodeBench(CPU, "llama-tiny", **options)  # type: ignore[arg-type]
    bench = DecodeBench(
        CPU, "tiny", (1,), (40,), 64, ("fp32",), ("transformers", "fuseline"), steps=2, runs=3
    )
    records = run(bench, tmp_path, lambda *_: None)
    skipped = [r for r in records if r.metric == "skipped"]
    assert [(r.peer, r.case["reason"]) for r in skipped] == [
        ("transformers", "only Llamas are compared with transformers here")
    ]
    assert "What was not measured" in report.build(records, tmp_path).read_text()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "decode", "--device", "cpu", "--out", str(tmp_path)]
    assert command([*arguments, "--dry-run"]) == 0
    assert "llama-tiny: " in capsys.readouterr().out
    small = ["--peers", "fuseline", "--formats", "fp32", "--batch-size", "1", "--steps", "2", "--runs", "3"]
    assert command([*arguments, *small, "--positions", "40"]) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "drawn at random" not in printed
    assert (tmp_path / "index.html").exists()


def test_max_autotune_and_inductors_own_clock_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "max-autotune" not in DecodeBench(CPU, "llama-tiny").peers
    seen: list[bool] = []

    def compiled(*given: Any, autotuned: bool, **options: Any) -> Compiled:
        seen.append(autotuned)
        return Compiled(*given, backend="eager", **options)

    monkeypatch.setattr(contenders, "Compiled", compiled)
    peers = ("fuseline", "gptfast", "max-autotune")
    bench = DecodeBench(CPU, "llama-tiny", (1,), (40,), 64, ("fp32",), peers, steps=2, runs=2)
    first = run(bench, tmp_path, lambda *_: None)
    second = run(replace(bench, own_clock=True, resume=True), tmp_path, lambda *_: None)
    rates = [r.peer for r in (*first, *second) if r.metric == "tokens_per_s"]
    assert rates == ["fuseline", "gptfast", "gptfast-own-clock"]
    skipped = {r.peer: r.case["reason"] for r in (*first, *second) if r.metric == "skipped"}
    reason = "max-autotune chooses among a GPU's kernels"
    assert skipped == {"max-autotune": reason, "max-autotune-own-clock": reason}
    assert seen == [False, False]
    assert not left(replace(bench, own_clock=True), tmp_path)


def test_max_autotune_compiles_with_that_option(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    for autotuned in (False, True):
        Compiled(in_plain_torch(model), batch=1, capacity=32, autotuned=autotuned)
    assert [options["options"]["max_autotune"] for options in asked] == [False, True]
    listed = torch._inductor.list_mode_options("max-autotune")
    assert {**asked[1]["options"], **listed} == asked[1]["options"]
