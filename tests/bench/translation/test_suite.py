from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuseline.bench.translation import TranslationBench, run
from fuseline.bench.translation.epoch_time import Timed
from fuseline.bench.translation.kernel_sets import KERNEL_SETS, NOTHING, with_kernels
from fuseline.bench.translation.quality import Learned
from fuseline.bench.translation.results import epoch_records, quality_records, work_records
from fuseline.bench.translation.step_work import StepWork, Work, kind_of
from fuseline.errors import InputError
from fuseline.models.translation import DecoderOnly
from fuseline.models.translation_config import TranslationConfig
from fuseline.records import describe, read
from fuseline.training.bleu import Bleu
from fuseline.training.translation_config import preset

SMALL = {
    "embed_dim": 16,
    "ffn_dim": 16,
    "num_heads": 2,
    "num_layers": 1,
    "vocab_size": 280,
    "max_tokens": 160,
}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TranslationBench:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "pairs.tsv"
    data.write_text("".join(f"Satz {n}\tsentence {n}\n" for n in range(60)), encoding="utf-8")
    return TranslationBench(
        device=torch.device("cpu"),
        config=replace(preset("seed", data=str(data)), **SMALL),
        recipe=replace(preset("tiny", data=str(data)), **SMALL, steps=2, beams=2),
        precisions=("fp32",),
        epochs=1.0,
        seeds=2,
        curve_steps=6,
        budget_s=5.0,
    )


def test_all_parts_end_in_records(bench: TranslationBench, tmp_path: Path) -> None:
    told: list[str] = []
    records = run(bench, tmp_path / "out", told.append)
    assert read(tmp_path / "out" / "translation.jsonl") == records
    by_section = {s: [r for r in records if r.case["section"] == s] for s in ("curve", "epoch", "quality")}
    curves = {
        kernels: [r.value for r in by_section["curve"] if r.metric == "loss" and r.case["kernels"] == kernels]
        for kernels in ("formulas", "torch", "fuseline")
    }
    assert len(curves["formulas"]) == 6
    assert curves["fuseline"] == pytest.approx(curves["formulas"], rel=1e-4)
    error = [r for r in by_section["curve"] if r.metric == "loss_error" and r.peer == "fuseline"]
    assert 0 <= error[0].value < 1e-4
    assert {(r.case["kernels"], r.metric) for r in by_section["epoch"]} >= {
        ("formulas", "epoch_s"),
        ("fuseline", "paired_speedup"),
        ("torch", "paired_speedup"),
        ("nothing", "amdahl_limit"),
        ("nothing", "amdahl_share"),
    }
    assert {r.case["execution"] for r in by_section["epoch"]} == {"eager"}  # a CPU has no graphs
    means = [r for r in by_section["quality"] if r.case.get("statistic")]
    assert {(r.peer, r.n) for r in means} == {("naive", 2), ("fuseline", 2)}
    recipe = [r for r in records if r.case["section"] == "recipe"]
    assert {"bleu", "training_s"} <= {r.metric for r in recipe}
    assert any("seed 2 of 2" in line for line in told)


def test_ratios_and_the_fusable_share() -> None:
    outcomes = [
        Timed("formulas", [10.0] * 8, batches_per_epoch=100),
        Timed("fuseline", [5.0] * 8, batches_per_epoch=100),
        Timed("nothing", [4.0] * 8, batches_per_epoch=100),
        Timed("torch", skipped="failed"),
    ]
    found = {(r.case["kernels"], r.metric): r for r in epoch_records(outcomes, {}, describe("cpu"))}
    assert found["formulas", "epoch_s"].value == pytest.approx(1.0)
    assert found["fuseline", "paired_speedup"].value == pytest.approx(2.0)
    assert found["nothing", "amdahl_limit"].value == pytest.approx(2.5)
    assert found["nothing", "amdahl_share"].value == pytest.approx(0.6)
    assert found["torch", "skipped"].case["reason"] == "failed"


def test_kernels_are_told_by_their_names() -> None:
    names = {
        "nvjet_hsh_128x64_64x9_4x1_v_bz_coopA_TNT": "products",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "products",
        "triton_tem_fused_mm_3": "products",
        "triton_poi_fused__scaled_dot_product_flash_attention_mm_5": "memory-bound",
        "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>": "memory-bound",
        "Memcpy DtoD (Device -> Device)": "memory-bound",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>": "attention",
        "void fuseline::short_attention::short_forward<__nv_bfloat16, 64, 32>": "attention",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor>": "update",
    }
    assert {name: kind_of(name) for name in names} == names


def test_the_limit_by_the_times_of_kernels() -> None:
    works = [
        StepWork(
            "formulas", {"products": Work(1.0, 10), "memory-bound": Work(3.0, 90), "update": Work(1.0, 5)}
        ),
        StepWork("fuseline", skipped="failed"),
    ]
    records = work_records(works, {}, describe("cpu"))
    found = {(r.case["kernels"], r.case.get("work"), r.metric): r for r in records}
    assert found["formulas", "all", "kernel_ms"].value == pytest.approx(5.0)
    assert found["formulas", "all", "launches"].value == 105
    assert found["nothing", None, "amdahl_share"].value == pytest.approx(0.6)
    assert found["nothing", None, "amdahl_limit"].value == pytest.approx(2.5)
    assert found["fuseline", None, "skipped"].case["reason"] == "failed"


def test_the_mean_over_seeds_has_students_interval() -> None:
    learned = [
        Learned("fuseline", seed, Bleu(score, "s"), 1.0, 10) for seed, score in enumerate((30.0, 32.0, 34.0))
    ]
    mean = next(r for r in quality_records(learned, {}, describe("cpu")) if r.case.get("statistic"))
    assert mean.value == pytest.approx(32.0)
    assert mean.high - mean.value == pytest.approx(4.30 * 2.0 / 3**0.5)
    assert mean.n == 3


def test_nothing_computes_nothing_but_reaches_every_product() -> None:
    config = TranslationConfig(vocab_size=20, num_layers=2, num_heads=2, embed_dim=8, ffn_dim=8, length=6)
    model = DecoderOnly(config)
    with_kernels(model, NOTHING)
    tokens = torch.randint(1, 20, (2, 6))
    model(tokens, tokens).backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name.endswith("qkv.weight"))
    assert model.chain.norms[0].weight.grad is None
    with_kernels(model, KERNEL_SETS["formulas"].kernels)
    assert model.attention[0].kernels is KERNEL_SETS["formulas"].kernels


def test_it_refuses_what_cannot_be(bench: TranslationBench) -> None:
    with pytest.raises(InputError, match="part of the comparison"):
        replace(bench, parts=("curve",))
    with pytest.raises(InputError, match="execution"):
        replace(bench, executions=("graphs",))
    with pytest.raises(InputError, match="no precision named 'bf17'"):
        replace(bench, precisions=("fp32", "bf17"))
    with pytest.raises(InputError, match="needs a seed"):
        replace(bench, seeds=0)
