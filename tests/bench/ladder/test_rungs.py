"""The ladder's data: rungs, combinations and reference tables agree, and name what there is."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest

from fuseline.acceleration.precision import PRECISIONS
from fuseline.bench.ladder.combinations import COMBINATIONS
from fuseline.bench.ladder.references import REFERENCES
from fuseline.bench.ladder.rungs import LEVERS, NO_LEVER, RUNGS, SLOTS, find_rung, why_not
from fuseline.bench.ladder.spec import SHAPES, RunSpec, baseline
from fuseline.models.gpt_config import PRESETS
from fuseline.training.execution import EXECUTIONS


def test_rungs_are_well_formed():
    assert max(Counter(rung.name for rung in RUNGS).values()) == 1
    assert {rung.slot for rung in RUNGS} == set(SLOTS)
    assert {rung.lever for rung in RUNGS} <= {*LEVERS, NO_LEVER}
    assert {key for rung in RUNGS for key in rung.change} <= {f.name for f in fields(RunSpec)}
    order = [SLOTS.index(rung.slot) for rung in RUNGS]
    assert order == sorted(order)


@pytest.mark.parametrize("slot", SLOTS)
def test_each_slot_begins_with_what_plain_pytorch_holds(slot):
    first, *others = [rung for rung in RUNGS if rung.slot == slot]
    base = baseline("gpt2")
    assert first.lever == NO_LEVER
    assert base.with_(first.change) == base
    assert all(base.with_(rung.change) != base and rung.lever != NO_LEVER for rung in others)


def test_every_execution_and_precision_of_the_trainer_is_a_rung(gpu):
    rungs = {r.change["execution"] for r in RUNGS if r.slot == "execution"}
    rows = {row.change["execution"] for c in COMBINATIONS for row in c.rungs("gpt2", gpu)}
    assert rungs | rows == set(EXECUTIONS)
    # A climb does not wait for kernels to be tried: only the combination does.
    assert set(EXECUTIONS) - rungs == {"max-autotune", "max-autotune-no-cudagraphs"}
    assert {r.change["precision"] for r in RUNGS if r.slot == "precision"} == set(PRECISIONS)


def test_every_preset_has_its_usual_shape():
    assert set(SHAPES) == set(PRESETS)
    assert all(SHAPES[name][1] <= config.block_size for name, config in PRESETS.items())


@pytest.mark.parametrize("name", ["tf32", "fp8", "cudagraphs", "graph", "reduce-overhead", "inductor-graph"])
def test_what_only_gpus_have_is_refused_on_a_cpu_and_runs_on_an_h100(name, cpu, gpu, base):
    rung = find_rung(name)
    spec = base.with_(rung.change)
    assert "CUDA" in rung.unavailable(cpu, spec)
    assert rung.unavailable(gpu, spec) is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_the_head_and_its_loss_are_climbed_in_every_precision(precision, gpu, base):
    rung = find_rung("linear-loss")
    assert rung.unavailable(gpu, replace(base, precision=precision).with_(rung.change)) is None


def test_bf16_on_a_cpu_depends_on_the_instructions_it_has(cpu, base):
    rung = find_rung("bf16")
    spec = base.with_(rung.change)
    assert "would not pay" in rung.unavailable(cpu, spec)
    assert rung.unavailable(replace(cpu, bf16="AMX"), spec) is None


def test_an_old_gpu_has_neither_tf32_nor_bf16(gpu, base):
    old = replace(gpu, capability=(7, 0), bf16=None)
    assert "8.0" in find_rung("tf32").unavailable(old, base)
    assert "8.9" in find_rung("fp8").unavailable(replace(gpu, capability=(8, 0)), base)
    assert "8.0" in find_rung("bf16").unavailable(old, base)


def test_missing_tools_are_the_reason(cpu, base):
    bare = replace(cpu, compiler_missing="no C++ compiler", native_missing="not loaded")
    for name, reason in (
        ("inductor", "no C++ compiler"),
        ("fuseline-kernels", "not loaded"),
        ("fused-softmax", "not loaded"),
    ):
        rung = find_rung(name)
        assert rung.unavailable(bare, base.with_(rung.change)) == reason


def test_padding_a_padded_vocabulary_is_nothing_to_do(cpu, base):
    rung = find_rung("padded-vocabulary")
    spec = base.with_(rung.change)
    assert spec.config.padded_vocab_size == 1024
    assert rung.unavailable(cpu, spec) is None
    assert "nothing to pad" in rung.unavailable(cpu, replace(spec, vocab_size=1024))


def test_a_loss_can_be_narrowed_only_where_logits_are_narrow(cpu, base):
    rung = find_rung("16-bit-loss")
    assert "fp32" in rung.unavailable(cpu, base.with_(rung.change))
    assert rung.unavailable(cpu, base.with_({**rung.change, "precision": "bf16"})) is None


def test_why_not_names_the_rung_that_stands_in_the_way(cpu, base):
    assert why_not(base, cpu) is None
    assert why_not(base.with_({"execution": "graph"}), cpu).startswith("graph: ")


@pytest.mark.parametrize("table", REFERENCES, ids=lambda table: table.combination)
def test_each_reference_row_stands_beside_a_row_of_ours(table, gpu):
    combination = next(c for c in COMBINATIONS if c.name == table.combination)
    for preset in {row.preset for row in table.rows}:
        ours = {rung.name: baseline(preset).with_(rung.change) for rung in combination.rungs(preset, gpu)}
        theirs = [row for row in table.rows if row.preset == preset]
        assert [row.rung for row in theirs] == [name for name in ours if table.row(name, preset)]
        assert all(row.batch in (None, ours[row.rung].batch) for row in theirs)


def test_the_anchors_hold_together():
    """Tokens a second, MFU and time of a row say the same thing three times."""
    anchors = next(table for table in REFERENCES if table.combination == "anchors")
    for row in anchors.rows:
        tokens = row.batch * (1024 if row.preset == "gpt2" else 256)
        assert row.tokens_per_s == pytest.approx(tokens / row.iteration_ms * 1e3, rel=2e-3)
        assert row.low <= row.iteration_ms <= row.high


def test_nanogpts_rows_are_bf16_and_fall_back_to_fp32_where_that_would_not_pay(cpu, gpu):
    for combination in COMBINATIONS:
        rows = combination.rungs("gpt2", gpu)
        assert {row.change["precision"] for row in rows} == {"bf16"}
        assert {row.change["precision"] for row in combination.rungs("gpt2", cpu)} == {"fp32"}


def test_the_seeds_rows_run_on_any_cpu_but_for_what_only_gpus_have(cpu, base):
    ran = {
        row.name
        for combination in COMBINATIONS
        if "any" in combination.rows
        for row in combination.rungs("tiny", cpu)
        if row.unavailable(cpu, base.with_(row.change)) is None
    }
    assert ran == {"naive", "math", "flash", "flash padded", "eager", "inductor"}
