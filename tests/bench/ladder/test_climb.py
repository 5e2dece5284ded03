"""What is compared with what, what is kept, and how the time is shared."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ladder.climb import Climb
from fuseline.bench.ladder.closing import between
from fuseline.bench.ladder.combinations import find_combination
from fuseline.bench.ladder.events import RungStarted
from fuseline.bench.ladder.model_spec import MODEL_COURSE, MODEL_RUNGS, RECORDED, ModelSpec
from fuseline.bench.ladder.result import Figure, Measurement, RungResult
from fuseline.bench.ladder.rungs import find_rung
from fuseline.bench.ladder.settings import Outcome
from fuseline.bench.ladder.spec import baseline
from fuseline.bench.ladder.torch_alone import TORCH_ALONE


def _rungs(*names):
    return [find_rung(name) for name in names]


def _by_name(results: list[RungResult]) -> dict[str, RungResult]:
    return {result.name: result for result in results}


def _ms(table, otherwise=100.0):
    """Milliseconds by (precision, attention, optimizer)."""
    return lambda spec: table.get((spec.precision, spec.attention, spec.optimizer), otherwise)


@pytest.fixture
def climb(gpu, scripted):
    def make(ms, *, budget=None, recorded=None, **options):
        measurer = scripted(ms, **options)
        events = []
        made = Climb(gpu, measurer, Budget(budget, measurer.clock), events.append, recorded)
        return made, measurer, events

    return make


def test_the_best_of_a_slot_is_kept_and_a_rung_that_slows_down_is_shown_and_dropped(climb, base):
    ms = _ms(
        {
            ("fp32", "naive", "unfused"): 100.0,
            ("bf16", "naive", "unfused"): 50.0,
            ("bf16", "math", "unfused"): 60.0,
            ("bf16", "flash", "unfused"): 25.0,
            ("bf16", "flash", "fused"): 20.0,
        }
    )
    made, measurer, _ = climb(ms)
    results = _by_name(list(made.cumulative(base, _rungs("tf32", "bf16", "math", "flash", "fused-adamw"))))
    assert {name: r.kept for name, r in results.items()} == {
        "plain PyTorch": True,
        "tf32": False,  # as fast as what it replaces: within the noise
        "bf16": True,
        "math": False,
        "flash": True,
        "fused-adamw": True,
    }
    assert results["math"].value("paired_speedup") == pytest.approx(50 / 60)
    assert results["math"].baseline == results["flash"].baseline == "bf16"
    assert results["fused-adamw"].baseline == "flash"
    assert results["fused-adamw"].value("speedup") == pytest.approx(5.0)
    # What is dropped is not built upon.
    assert measurer.asked[4][0].attention == "flash"
    assert measurer.asked[4][1] == base.with_({"precision": "bf16"})
    assert [r.order for r in results.values()] == list(range(6))


def test_the_ends_of_the_climb_are_compared_in_turn(climb, base):
    made, measurer, _ = climb(_ms({("bf16", "naive", "unfused"): 50.0, ("bf16", "flash", "unfused"): 25.0}))
    results = list(made.cumulative(base, _rungs("bf16", "flash", "fused-adamw")))
    confirmed = made.confirm(Budget(100.0, measurer.clock))
    assert measurer.compared == [(results[2].spec, base)]
    assert (confirmed.name, confirmed.order) == ("flash", 2)
    assert confirmed.measurement.figures["speedup"].n == 9
    assert confirmed.value("iteration_ms") == results[2].value("iteration_ms")


def _with_speedup(result: RungResult, *figure: float) -> RungResult:
    figures = {**result.measurement.figures, "speedup": Figure(*figure)}
    return replace(result, measurement=replace(result.measurement, figures=figures))


def test_what_the_ends_in_turn_say_is_shared_out_by_how_sure_each_ratio_is(climb, base):
    """Through the rungs flash is at 4x, in turn at 3x: the more of that is bf16's, the wider its interval is
    beside that of both. Fused AdamW and math were dropped, and stay 10% and 20% behind what they were
    compared with."""
    names = ("bf16", "math", "flash", "fused-adamw")
    made, _, _ = climb(_ms({("bf16", "naive", "unfused"): 50.0, ("bf16", "flash", "unfused"): 25.0}))
    results = list(made.cumulative(base, _rungs(*names)))
    spans = ((2.0, 1.8, 2.2), (1.6, 1.5, 1.7), (4.0, 3.59, 4.43), (3.6, 3.2, 4.0))
    results = [results[0], *(_with_speedup(r, *span) for r, span in zip(results[1:], spans, strict=True))]
    confirmed = _with_speedup(results[3], 3.0, 2.9, 3.1)
    closed = {r.name: r.value("speedup") for r in between(results, confirmed)}
    assert set(closed) == {"bf16", "math", "fused-adamw"}
    share = (math.log(2.2 / 1.8) / math.log(4.43 / 3.59)) ** 2
    assert closed["bf16"] == pytest.approx(2.0 * 0.75**share)
    assert closed["math"] == pytest.approx(0.8 * closed["bf16"])
    assert closed["fused-adamw"] == pytest.approx(0.9 * 3.0)


def test_a_comparison_that_was_disturbed_is_not_taken(climb, base, monkeypatch):
    made, measurer, _ = climb(_ms({("bf16", "naive", "unfused"): 50.0}))
    list(made.cumulative(base, _rungs("bf16")))
    monkeypatch.setattr(measurer, "compare", lambda *_, **__: Figure(4.5, 1.1, 16.8, 5))
    assert made.confirm(Budget(100.0, measurer.clock)) is None


def test_without_time_or_without_gain_there_is_nothing_to_compare(climb, base):
    made, measurer, _ = climb(_ms({("bf16", "naive", "unfused"): 50.0}))
    list(made.cumulative(base, _rungs("bf16")))
    assert made.confirm(Budget(0.5, measurer.clock)) is None
    flat, measurer, _ = climb(lambda spec: 100.0)
    list(flat.cumulative(base, _rungs("bf16")))
    assert flat.confirm(Budget(None)) is None
    assert measurer.compared == []


def test_a_gain_within_the_interval_is_not_kept(climb, base):
    made, _, _ = climb(_ms({("bf16", "naive", "unfused"): 99.5}))
    assert [r.kept for r in made.cumulative(base, _rungs("bf16"))] == [True, False]


def test_alone_compares_each_rung_with_the_baseline(climb, base):
    made, measurer, _ = climb(
        _ms({("bf16", "naive", "unfused"): 50.0, ("fp32", "efficient", "unfused"): 80.0})
    )
    results = list(made.alone(base, _rungs("bf16", "efficient")))
    assert [against for _, against in measurer.asked] == [None, base, base]
    assert results[2].spec == base.with_({"attention": "efficient"})
    assert results[2].value("speedup") == pytest.approx(1.25)


def test_a_rung_that_cannot_run_has_its_reason_and_the_climb_goes_on(climb, base):
    def ms(spec):
        return "out of memory" if spec.attention == "math" else 100.0 / (1 + (spec.attention == "efficient"))

    made, _, _ = climb(ms)
    results = _by_name(list(made.cumulative(base, _rungs("math", "efficient"))))
    assert results["math"].reason == "out of memory"
    assert results["efficient"].kept
    assert results["efficient"].baseline == "plain PyTorch"


def test_a_climb_whose_first_rung_does_not_fit_starts_from_the_next_that_does(climb, base):
    made, measurer, _ = climb(lambda spec: "out of memory" if spec.precision == "fp32" else 50.0)
    results = list(made.cumulative(base, _rungs("bf16", "flash")))
    assert [r.kept for r in results] == [False, True, False]
    assert measurer.asked[1][1] is None
    assert measurer.asked[2][1] == base.with_({"precision": "bf16"})


def test_what_a_machine_cannot_do_is_listed_and_not_measured(climb, cpu, base, scripted):
    measurer = scripted(lambda spec: 1.0)
    made = Climb(cpu, measurer, Budget(None), lambda event: None)
    results = _by_name(list(made.cumulative(base, _rungs("tf32", "bf16", "cudagraphs"))))
    assert len(measurer.asked) == 1
    assert "AVX512-BF16" in results["bf16"].reason
    assert "CUDA" in results["cudagraphs"].reason


def test_a_rung_that_changes_nothing_any_more_says_so(climb, base):
    def ms(spec):
        return 10.0 if spec.precision == "fp16" else 100.0

    made, measurer, _ = climb(ms)
    results = list(made.cumulative(base, _rungs("fp16", "fused-adamw")))
    assert results[1].kept
    assert results[2].reason == "nothing to change: fp16 has it already"
    assert len(measurer.asked) == 2


def test_a_rung_that_needs_another_slot_is_not_credited_with_it(climb, base):
    """fp16 takes the fused AdamW along: what it is compared with must have it, too."""
    ms = {("fp32", "unfused"): 100.0, ("fp32", "fused"): 80.0, ("fp16", "fused"): 80.0}
    made, measurer, _ = climb(lambda spec: ms[spec.precision, spec.optimizer])
    fp16 = list(made.cumulative(base, _rungs("fp16")))[1]
    assert measurer.asked[1][1] == base.with_({"optimizer": "fused"})
    assert fp16.value("paired_speedup") == pytest.approx(1.0)
    assert not fp16.kept
    assert "optimizer fused" in fp16.measurement.note


def test_kernels_are_looked_at_again_once_a_compiler_pays(climb, base):
    def ms(spec):
        eager = 90.0 if spec.kernels == "fuseline" else 100.0
        compiled = {"inductor": 60.0 if spec.kernels == "fuseline" else 50.0, "reduce-overhead": 40.0}
        return compiled.get(spec.execution, eager)

    made, _, _ = climb(ms)
    results = list(made.cumulative(base, _rungs("fuseline-kernels", "inductor", "reduce-overhead")))
    assert [(r.name, r.kept) for r in results] == [
        ("plain PyTorch", True),
        ("fuseline-kernels", True),
        ("inductor", True),
        ("torch-kernels", True),
        ("reduce-overhead", True),
    ]
    assert results[4].spec.kernels == "torch"
    assert [r.order for r in results] == list(range(5))


def test_a_loss_of_ours_is_looked_at_again_too(climb, base):
    def ms(spec):
        eager = 90.0 if spec.loss == "fuseline" else 100.0
        return (60.0 if spec.loss == "fuseline" else 50.0) if spec.is_compiled else eager

    made, _, _ = climb(ms)
    results = list(made.cumulative(base, _rungs("fused-loss", "inductor")))
    assert [(r.name, r.kept) for r in results[1:]] == [
        ("fused-loss", True),
        ("inductor", True),
        ("fp32-loss", True),
    ]
    assert results[-1].spec.loss == "float32"


def test_kernels_that_were_left_out_are_not_looked_at_again(climb, base):
    made, _, _ = climb(lambda spec: 50.0 if spec.is_compiled else 100.0)
    results = list(made.cumulative(base, _rungs("fuseline-kernels", "inductor")))
    assert [r.name for r in results] == ["plain PyTorch", "fuseline-kernels", "inductor"]


def test_the_budget_is_kept_and_what_it_does_not_reach_is_listed(climb, base):
    made, measurer, _ = climb(lambda spec: 100.0, budget=25.0, cost=10.0, fixed=lambda spec: 4.0)
    results = list(made.alone(base, _rungs("tf32", "bf16", "math", "efficient")))
    assert [r.reason is None for r in results] == [True, True, True, False, False]
    assert "not reached" in results[3].reason
    assert results[3].measurement.out_of_budget
    assert measurer.clock.now == 30.0  # the third began with 5 s left, and 4 is what it was expected to take


def test_the_time_left_is_shared_among_the_rungs_to_come(climb, base):
    def fixed(spec):
        return 40.0 if spec.execution == "inductor" else 5.0

    made, measurer, _ = climb(lambda spec: 100.0, budget=100.0, cost=10.0, fixed=fixed)
    list(made.alone(base, _rungs("bf16", "inductor")))
    # 100 less 5 + 5 + 40 for three; then 90 less 5 + 40 for two; then 80 less 40 for the last.
    assert measurer.seconds == pytest.approx([50 / 3, 22.5, 40.0])


def test_what_cannot_run_takes_no_share(climb, cpu, base, scripted):
    measurer = scripted(lambda spec: 100.0)
    made = Climb(cpu, measurer, Budget(10.0, measurer.clock), lambda event: None)
    list(made.cumulative(base, _rungs("tf32", "cudagraphs", "graph")))
    assert measurer.seconds == [9.0]


def test_recorded_specs_are_not_run_again(climb, base):
    ms = _ms({("bf16", "naive", "unfused"): 50.0, ("bf16", "flash", "unfused"): 25.0})
    made, _, _ = climb(ms)
    earlier = {r.spec: r for r in made.cumulative(base, _rungs("bf16"))}
    again, measurer, events = climb(ms, recorded=earlier)
    results = _by_name(list(again.cumulative(base, _rungs("bf16", "flash"))))
    assert [spec.attention for spec, _ in measurer.asked] == ["flash"]
    assert [e.name for e in events if isinstance(e, RungStarted)] == ["flash"]
    assert results["bf16"].kept
    assert results["bf16"].value("paired_speedup") == pytest.approx(2.0)
    assert results["flash"].value("speedup") == pytest.approx(4.0)


def test_a_recorded_ratio_is_not_passed_off_as_one_to_another_rung(climb, base):
    made, _, _ = climb(_ms({("bf16", "naive", "unfused"): 50.0}))
    earlier = {r.spec: r for r in made.cumulative(base, _rungs("bf16"))}
    del earlier[base]
    again, _, _ = climb(lambda spec: "out of memory", recorded=earlier)
    result = _by_name(list(again.cumulative(base, _rungs("bf16"))))["bf16"]
    assert result.value("iteration_ms") == 50.0
    assert result.value("paired_speedup") is None


def test_a_combination_pairs_each_row_with_the_one_before(climb):
    base = baseline("gpt2")
    made, measurer, _ = climb(lambda spec: {16: 50.0, 32: 90.0, 64: 170.0}[spec.batch])
    results = list(made.combination(find_combination("anchors"), base))
    assert len(results) == 14
    ran = [r for r in results if r.reason is None]  # a torch without cuDNN leaves two rows out
    assert len(ran) >= 12
    assert all(r.mode == "anchor" and r.combination == "anchors" and r.kept for r in ran)
    assert measurer.asked[0][1] is None
    assert all(measurer.asked[i][1] == measurer.asked[i - 1][0] for i in range(1, len(ran) - 2))
    # Another batch is other work: there is nothing to pair it with.
    larger = _by_name(results)["inductor default 50304 B=32"]
    assert larger.spec.batch == 32
    assert larger.baseline is None
    assert larger.value("speedup") is None


def test_a_combination_is_run_in_its_order_as_far_as_time_reaches(climb):
    """Its rows have names of rungs that gain much, and no time is kept for those: the first one is what all
    are compared with."""
    base = baseline("gpt2")
    made, _, _ = climb(lambda spec: 50.0, budget=130.0, cost=40.0, fixed=lambda spec: 60.0)
    results = list(made.combination(find_combination("seed-001"), base))
    ran = [r.name for r in results if r.reason is None]
    assert ran == ["naive", "math"]
    assert all(r.measurement.out_of_budget for r in results[2:])


def test_speedups_are_paired_ratios_multiplied(climb, base):
    """The machine slows down threefold after the first rung: medians would say that nothing was gained."""
    ms = {"naive": 300.0, "efficient": 150.0}
    made, measurer, _ = climb(lambda spec: ms[spec.attention] * (0.5 if spec.optimizer == "fused" else 1.0))
    measure = measurer.measure

    def drifting(spec, against, **limits):
        found = measure(spec, against, **limits)
        if against is None:
            slow = {"iteration_ms": Figure(100.0, 99.0, 101.0, 5)}
            return Measurement(figures=slow)
        return found

    measurer.measure = drifting
    results = _by_name(list(made.cumulative(base, _rungs("efficient", "fused-adamw"))))
    assert results["efficient"].value("speedup") == pytest.approx(2.0)
    assert results["fused-adamw"].value("speedup") == pytest.approx(4.0)
    speedup = results["fused-adamw"].measurement.figures["speedup"]
    assert speedup.high / speedup.value == pytest.approx(1 + 0.01 * 2**0.5, rel=1e-3)


def test_torch_alone_is_paired_with_the_best_rung_in_each_of_its_modes(climb, base):
    def ms(spec):
        return {"eager": 40.0, "inductor": 50.0, "reduce-overhead": 45.0}[spec.execution] - (
            10.0 if spec.kernels == "fuseline" else 0.0
        )

    made, _, _ = climb(ms)
    list(made.cumulative(base, _rungs("fuseline-kernels", "fused-adamw")))
    found = list(made.torch_alone(_rungs("fuseline-kernels", "fused-adamw")))
    assert [r.name for r in found] == ["torch alone: inductor", "torch alone: reduce-overhead"]
    spec = found[1].spec
    assert (spec.kernels, spec.optimizer, spec.attention) == ("torch", "fused", "auto")
    assert found[1].baseline == "fuseline-kernels"
    assert found[1].value("paired_speedup") == pytest.approx(30 / 45)
    assert found[1].value("speedup") == pytest.approx(40 / 45)
    assert not any(r.kept for r in found)
    outcome = Outcome(results=found)
    assert outcome.torch_alone is found[1]
    assert outcome.over_torch.value == pytest.approx(45 / 30)


def test_where_the_best_rung_is_torchs_own_nothing_is_measured_twice(climb, cpu, base, scripted):
    measurer = scripted(
        lambda spec: 50.0 if spec.is_compiled else 90.0 if spec.attention == "flash" else 100.0
    )
    made = Climb(cpu, measurer, Budget(None), lambda event: None, second_baseline=True)
    rungs = _rungs("inductor", "flash")
    fused = base.with_({"optimizer": "fused"})
    results = list(made.cumulative(fused, rungs))
    assert [r.name for r in results] == ["plain PyTorch", "flash", "inductor"]
    asked = len(measurer.asked)
    alone, written_out = made.torch_alone(rungs)
    # On a processor the formula written out is looked at beside SDPA; it is no faster here.
    assert [spec for spec, _ in measurer.asked[asked:]] == [written_out.spec]
    assert (written_out.spec.attention, written_out.kept) == ("naive", False)
    assert (alone.slot, alone.value("paired_speedup"), alone.spec) == (TORCH_ALONE, 1.0, results[-1].spec)


def test_on_a_cpu_the_largest_gains_are_tried_first_and_time_is_kept_for_the_compiler(cpu, base, scripted):
    def fixed(spec):
        return 60.0 if spec.is_compiled else 3.0

    measurer = scripted(lambda spec: 100.0, cost=10.0, fixed=fixed)
    made = Climb(cpu, measurer, Budget(100.0, measurer.clock), lambda event: None)
    names = ("padded-vocabulary", "fused-loss", "fused-adamw", "inductor", "flash")
    results = list(made.cumulative(base.with_({"vocab_size": 1001}), _rungs(*names)))
    assert [r.name for r in results] == [
        *("plain PyTorch", "fused-adamw", "flash", "padded-vocabulary", "fused-loss", "inductor"),
    ]
    assert [r.name for r in results if r.reason] == ["fused-loss"]
    assert "60 s of them for rungs that gain more" in results[4].reason
    assert results[4].measurement.out_of_budget


def test_on_a_cpu_too_slow_for_all_the_quick_gains_come_before_the_compiler(cpu, base, scripted):
    """A busy machine: 69 s before a compiled step is timed, once in the climb and once for torch alone, and
    13 for any other. Time that is kept for the compiler is not taken from bf16."""

    def fixed(spec):
        return 69.0 if spec.is_compiled else 13.0

    measurer = scripted(
        _ms({("bf16", "naive", "unfused"): 60.0, ("bf16", "naive", "fused"): 50.0}), cost=25.0
    )
    measurer.fixed = fixed
    able = replace(cpu, bf16="matrix units")
    made = Climb(able, measurer, Budget(150.0, measurer.clock), lambda event: None, second_baseline=True)
    results = list(
        made.cumulative(base, _rungs("padded-vocabulary", "bf16", "flash", "fused-adamw", "inductor"))
    )
    assert [r.name for r in results if r.reason is None][:4] == [
        "plain PyTorch",
        "bf16",
        "fused-adamw",
        "inductor",
    ]


def test_no_time_is_kept_for_what_comes_too_late_anyway(cpu, base, scripted):
    def fixed(spec):
        return 60.0 if spec.is_compiled else 3.0

    measurer = scripted(lambda spec: 100.0, cost=4.0, fixed=fixed)
    made = Climb(cpu, measurer, Budget(50.0, measurer.clock), lambda event: None, second_baseline=True)
    results = list(made.cumulative(base, _rungs("fused-adamw", "inductor", "flash")))
    assert [r.name for r in results if r.reason is None] == ["plain PyTorch", "fused-adamw", "flash"]
    assert measurer.seconds[1] > 0.0


def test_a_models_recorded_step_is_reached_where_time_is_too_short_for_all_compilers(gpu, scripted):
    def fixed(spec):
        return 60.0 if spec.is_compiled else 40.0 if spec.execution == RECORDED else 1.0

    measurer = scripted(lambda spec: 100.0, cost=20.0, fixed=fixed)
    climb = Climb(gpu, measurer, Budget(201.0, measurer.clock), lambda event: None, course=MODEL_COURSE)
    rungs = [r for r in MODEL_RUNGS if r.name not in ("fp8", "own-modules", "max-autotune")]
    left_out = {r.name: r.reason for r in climb.cumulative(ModelSpec("a model", 4), rungs) if r.reason}
    assert list(left_out) == ["reduce-overhead"]
    assert "40 s of them for rungs that gain more" in left_out["reduce-overhead"]
