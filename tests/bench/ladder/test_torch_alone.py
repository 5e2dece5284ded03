"""The second baseline does what torch does best by itself, on a processor too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ladder.climb import Climb
from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.model_spec import MODEL_COURSE, ModelSpec
from fuseline.bench.ladder.result import RungResult
from fuseline.bench.ladder.rungs import find_rung
from fuseline.bench.ladder.settings import Outcome, Settings
from fuseline.bench.ladder.spec import RunSpec
from fuseline.bench.ladder.torch_alone import modes_told, rung_of, torch_alone


def test_on_a_processor_attention_written_out_is_tried_beside_sdpa(
    base: RunSpec, cpu: Machine, gpu: Machine
) -> None:
    ours = base.with_({"attention": "naive_fused", "loss": "fuseline"})
    specs = torch_alone(ours, cpu)
    assert [spec.attention for spec in specs] == ["naive", "auto"]
    assert {(spec.kernels, spec.loss, spec.optimizer) for spec in specs} == {("torch", "float32", "fused")}
    assert len({rung_of(spec).name for spec in specs}) == 2
    after_flash = torch_alone(ours.with_({"attention": "flash"}), cpu)
    assert [spec.attention for spec in after_flash] == ["flash", "naive"]
    assert {spec.attention for spec in torch_alone(ours, gpu)} == {"auto"}


def test_max_autotune_is_torchs_too_where_it_is_asked_for(
    base: RunSpec, cpu: Machine, gpu: Machine, tmp_path: Path
) -> None:
    usual = [spec.execution for spec in torch_alone(base, gpu)]
    assert usual == ["inductor", "reduce-overhead"]
    assert [spec.execution for spec in torch_alone(base, gpu, autotuned=True)] == [*usual, "max-autotune"]
    assert torch_alone(base, cpu, autotuned=True) == torch_alone(base, cpu)
    model = ModelSpec("a model", 4)
    assert [spec.execution for spec in MODEL_COURSE.autotuned().torch_alone(model, gpu)][-1] == "max-autotune"
    for asked, last in ((False, "reduce-overhead"), (True, "max-autotune")):
        course = Settings("gpt2", "cpu", tmp_path, max_autotune=asked).course
        assert course.torch_alone(base, gpu)[-1].execution == last


def test_which_modes_were_timed_is_said() -> None:
    assert modes_told(["inductor"]) == "Torch alone was timed as inductor."
    assert modes_told(["inductor", "reduce-overhead"]).endswith(
        "not as max-autotune, which --max-autotune adds."
    )
    assert modes_told(["inductor", "reduce-overhead", "max-autotune"]) == (
        "Torch alone was timed as inductor and reduce-overhead and max-autotune."
    )


def _hidden_from_the_compiler(spec: RunSpec) -> float:
    """Milliseconds where our softmax pays eagerly and keeps the compiler from fusing more than it gains."""
    if not spec.is_compiled:
        return 70.0 if spec.attention == "naive_fused" else 100.0
    step = {"naive": 40.0, "naive_fused": 80.0, "auto": 90.0}[spec.attention]
    return step - (10.0 if spec.loss == "fuseline" else 0.0)


def _climbed(
    ms: Callable[[RunSpec], float], names: tuple[str, ...], machine: Machine, base: RunSpec, scripted: type
) -> tuple[Climb, list[RungResult], type]:
    measurer = scripted(ms)
    climb = Climb(machine, measurer, Budget(None), lambda event: None, second_baseline=True)
    rungs = [rung for name in names if (rung := find_rung(name))]
    fused = base.with_({"optimizer": "fused"})
    return climb, [*climb.cumulative(fused, rungs), *climb.torch_alone(rungs)], measurer


def test_a_climb_goes_on_from_torchs_best_where_that_is_ahead(
    base: RunSpec, cpu: Machine, scripted: type
) -> None:
    def ms(spec: RunSpec) -> float:
        # Eagerly the loss costs more than it gains, so that it is not on the way up.
        slower = 20.0 if spec.loss == "fuseline" and not spec.is_compiled else 0.0
        return _hidden_from_the_compiler(spec) + slower

    names = ("fused-softmax", "fused-loss", "inductor")
    climb, results, measurer = _climbed(ms, names, cpu, base, scripted)
    assert [(r.name, r.kept) for r in results] == [
        ("plain PyTorch", True),
        ("fused-softmax", True),
        ("fused-loss", False),
        ("inductor", False),
        ("torch alone: inductor, no SDPA", False),
        ("torch alone: inductor", False),
        ("torch's inductor, no SDPA", True),
        ("fused-loss on torch's best", True),
    ]
    taken, last = results[6], results[7]
    assert taken.spec == results[4].spec
    assert taken.baseline == "fused-softmax"
    assert taken.value("speedup") == pytest.approx(100 / 40)
    assert measurer.asked[-1] == (last.spec, taken.spec)
    assert last.value("speedup") == pytest.approx(100 / 30)

    outcome = Outcome(results=results)
    confirmed = climb.confirm(Budget(100.0))
    assert confirmed is not None
    for result in climb.torch_beside(confirmed):
        outcome.put(result)
    assert outcome.best is last
    assert outcome.torch_alone is not None
    assert outcome.torch_alone.baseline == last.name
    assert outcome.over_torch is not None
    assert outcome.over_torch.value == pytest.approx(40 / 30)
    assert outcome.torch_alone.value("speedup") == pytest.approx(100 / 40)
    with_sdpa = outcome.results[5]
    assert with_sdpa.value("paired_speedup") == pytest.approx(30 / 90)


def test_a_ladder_never_ends_below_torch_alone(base: RunSpec, cpu: Machine, scripted: type) -> None:
    climb, results, _ = _climbed(
        _hidden_from_the_compiler, ("fused-softmax", "inductor"), cpu, base, scripted
    )
    outcome = Outcome(results=results)
    for result in climb.torch_beside(climb.confirm(Budget(100.0))):
        outcome.put(result)
    assert outcome.best is not None
    assert outcome.torch_alone is not None
    assert outcome.over_torch is not None
    assert outcome.best.name == "torch's inductor, no SDPA"
    assert outcome.torch_alone.spec == outcome.best.spec
    assert outcome.over_torch.value == 1.0


def test_attention_written_out_is_looked_at_again_once_a_compiler_pays(
    base: RunSpec, cpu: Machine, scripted: type
) -> None:
    def ms(spec: RunSpec) -> float:
        compiled = {"naive": 40.0, "naive_fused": 60.0, "auto": 90.0}
        if spec.is_compiled:
            return compiled[spec.attention]
        return 70.0 if spec.attention == "naive_fused" else 100.0

    _, results, _ = _climbed(ms, ("fused-softmax", "inductor"), cpu, base, scripted)
    assert [(r.name, r.kept) for r in results[1:5]] == [
        ("fused-softmax", True),
        ("inductor", True),
        ("naive", True),
        ("torch alone: inductor, no SDPA", False),
    ]
    assert results[4].value("paired_speedup") == 1.0


def test_what_was_timed_beside_the_best_rung_already_is_not_timed_again(
    base: RunSpec, cpu: Machine, scripted: type
) -> None:
    def ms(spec: RunSpec) -> float:
        eager = 70.0 if spec.attention == "naive_fused" else 100.0
        return (
            {"naive": 59.8, "naive_fused": 60.0, "auto": 90.0}[spec.attention] if spec.is_compiled else eager
        )

    _, results, measurer = _climbed(ms, ("fused-softmax", "inductor"), cpu, base, scripted)
    assert [(r.name, r.kept) for r in results[3:5]] == [
        ("naive", False),  # within the noise
        ("torch alone: inductor, no SDPA", False),
    ]
    assert [spec for spec, _ in measurer.asked].count(results[3].spec) == 1
    assert results[-1].name == "torch's inductor, no SDPA"
