"""The ladder of a model of the user's own: every rung the same model at the same weights, whatever it is."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseline.acceleration import accelerate, kept_proofs
from fuseline.bench import ladder
from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.model_spec import MODEL_COURSE, MODEL_RUNGS, ModelSpec
from fuseline.bench.ladder.model_work import ModelWorkload, spec_of
from fuseline.bench.ladder.torch_alone import TORCH_ALONE
from fuseline.errors import InputError
from fuseline.profiling.user_code import Work, made
from fuseline.records import read
from fuseline.report import build

CPU = torch.device("cpu")


class Net(nn.Module):
    """Returns logits and loss, in nanoGPT's order."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(32, 64)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embedding(tokens)
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory):
    """Runs are not made again, proofs are the tests' own, what is proved is kept, and one thread computes:
    for a model this small two wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fuseline.bench.ladder.measure.REPEATS", 0)
        patch.setattr("fuseline.bench.ladder.machine.cpu_bf16", lambda: "AMX")  # whatever this machine has
        patch.setattr("fuseline.bench.ladder.model_work.accelerate", partial(accelerate, time_sites=False))
        folder = tmp_path_factory.mktemp("proofs")
        patch.setattr(kept_proofs, "folder", lambda: folder)
        yield
    torch.set_num_threads(threads)


def settings(work: Work, out: Path, rungs: tuple[str, ...], **changes: object) -> ladder.ModelSettings:
    base = {"preset": "mine.py:make", "device": "cpu", "rungs": rungs, "steps": 1, "runs": 3}
    return ladder.ModelSettings(out=out, work=work, **{**base, **changes})


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    torch.manual_seed(0)
    work = made((Net(), tokens()), "mine.py:make")
    before = {name: tensor.clone() for name, tensor in work.model.state_dict().items()}
    out = tmp_path_factory.mktemp("climbed") / "out"
    asked = settings(work, out, ("tf32", "bf16", "fused-adamw", "accelerate"), mode="alone")
    outcome = ladder.run_model(asked, lambda event: None)
    return outcome, read(out / ladder.RECORDS), work, before


def test_every_rung_is_measured_or_has_its_reason(climbed):
    outcome, records, _, _ = climbed
    results = {result.name: result for result in outcome.results}
    assert list(results) == ["the model as it came", "tf32", "bf16", "fused-adamw", "accelerate"]
    assert "CUDA" in results.pop("tf32").reason
    for name, result in results.items():
        figures = result.measurement.figures
        assert figures["tokens_per_s"].value == pytest.approx(4 * 16 * 1e3 / figures["iteration_ms"].value)
        assert ("paired_speedup" in figures) == (name != "the model as it came")
        assert result.measurement.kernels
    assert results["accelerate"].measurement.note.startswith("accelerate put in 1 ")
    assert {r.case["preset"] for r in records} == {"Net of mine.py:make"}
    assert {r.case["rung"] for r in records if r.metric == "iteration_ms"} == set(results)


def test_errors_are_those_of_the_number_format(climbed):
    outcome, _, _, _ = climbed
    errors = {r.name: r.value("grad_error") for r in outcome.results if r.reason is None}
    assert 1e-4 < errors.pop("bf16") < 5e-2
    assert all(error < 1e-5 for error in errors.values())
    assert all(r.value("loss_error") < 1e-2 for r in outcome.results if r.reason is None)


def test_the_users_model_stays_as_it_was(climbed):
    _, _, work, before = climbed
    assert all(torch.equal(tensor, before[name]) for name, tensor in work.model.state_dict().items())
    assert all("forward" not in module.__dict__ for module in work.model.modules())
    assert all(p.grad is None for p in work.model.parameters())


def test_the_page_is_the_ladders(climbed, tmp_path):
    _, records, _, _ = climbed
    page = build(records, tmp_path).read_text()
    wanted = "Ladder: Net of mine.py:make", "Each rung alone", "the model as it came", "accelerate put in 1 "
    assert all(said in page for said in wanted)


def test_a_loss_of_its_own_and_a_batch_of_names(tmp_path):
    """The loss function is called with the model and its batch, in every rung."""
    tokens_BT, targets_BT = tokens()
    seen = []

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(sorted(batch))
        return F.cross_entropy(model(batch["tokens"])[0].flatten(0, 1), targets_BT.flatten())

    work = made((Net(), {"tokens": tokens_BT, "targets": None}, loss_fn), "mine.py:make")
    outcome = ladder.run_model(settings(work, tmp_path, ("accelerate",)), lambda event: None)
    accelerated = outcome.results[1]
    assert accelerated.reason is None
    assert accelerated.value("grad_error") < 1e-5
    assert all(names == ["targets", "tokens"] for names in seen)


def test_of_a_model_that_drops_no_errors_are_told(tmp_path):
    work = made((Net(dropout=0.5), tokens()), "mine.py:make")
    outcome = ladder.run_model(settings(work, tmp_path, ("fused-adamw",)), lambda event: None)
    assert [r.reason for r in outcome.results] == [None, None]
    assert all(r.value("grad_error") is None for r in outcome.results)


def test_memory_is_that_of_a_step_after_the_proofs_with_what_its_graphs_hold(tmp_path, monkeypatch):
    peaks, graphs = itertools.cycle((9.0, 2.0)), itertools.cycle((0.25, 0.75))
    monkeypatch.setattr("fuseline.bench.ladder.measure.peak_memory_gib", lambda device: next(peaks))
    monkeypatch.setattr("fuseline.bench.ladder.measure.recorded_graphs_gib", lambda device: next(graphs))
    work = made((Net(), tokens()), "mine.py:make")
    outcome = ladder.run_model(settings(work, tmp_path, ("fused-adamw",)), lambda event: None)
    timed = [result for result in outcome.results if result.reason is None]
    assert timed
    assert {result.value("peak_memory_gib") for result in timed} == {2.5}


def test_weights_in_16_bits_are_climbed_as_they_came(tmp_path):
    work = made((Net().bfloat16(), tokens()), "mine.py:make")
    outcome = ladder.run_model(settings(work, tmp_path, ("bf16", "fused-adamw")), lambda event: None)
    reasons = {r.name: r.reason for r in outcome.results}
    assert reasons["bf16"] == "the weights are bf16 already"
    assert {r.spec.case()["dtype"] for r in outcome.results} == {"bf16"}
    assert 1e-4 < outcome.results[0].value("grad_error") < 5e-2


def test_what_a_batch_is_made_of_is_counted():
    assert spec_of(made((Net(), tokens()), "m"), "m") == ModelSpec("Net of m", 4, 16)
    images = made((nn.Conv2d(3, 4, 1), torch.zeros(5, 3, 2, 2)), "m")
    assert spec_of(images, "m") == ModelSpec("Conv2d of m", 5)
    assert str(spec_of(images, "m")) == "Conv2d of m, 5 examples a step"


class Held(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock = threading.Lock()


class Mixed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())


@pytest.mark.parametrize(
    "returned, said",
    [
        ((nn.Linear(2, 2), torch.zeros(3, 5)), "The model fails on its batch: RuntimeError"),
        ((nn.Linear(2, 2), torch.zeros(3, 2)), "and no loss"),
        ((nn.ReLU(), torch.zeros(3, 2)), "nothing to train"),
        ((Mixed(), torch.zeros(3, 2)), "are bfloat16, float32"),
        ((nn.Linear(2, 2), torch.zeros(())), "no dimension for its examples"),
        ((Held(), torch.zeros(3, 2)), "cannot be copied"),
    ],
)
def test_what_cannot_be_climbed_is_refused_before_the_climb(returned, said, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InputError, match=said):
        ladder.run_model(settings(made(returned, "m"), out, ()), lambda event: None)
    assert not out.exists()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"mode": "combination"}, "no mode for a model of your own"),
        ({"resume": True}, "may have changed since"),
        ({"rungs": ("flash",)}, "no rung, slot or combination named 'flash'"),
        ({"rungs": ("own-modules",)}, "stands already"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, said, tmp_path):
    with pytest.raises(InputError, match=said):
        ladder.plan(dataclasses.replace(settings(made((Net(), tokens()), "m"), tmp_path, ()), **changes))


def test_torch_alone_runs_the_models_own_modules(gpu: Machine) -> None:
    best = ModelSpec("m", 4, precision="bf16", kernels="fuseline", execution="recorded")
    alone = MODEL_COURSE.torch_alone(best, gpu)
    assert [(spec.execution, spec.kernels, spec.optimizer, spec.precision) for spec in alone] == [
        ("inductor", "torch", "fused", "bf16"),
        ("reduce-overhead", "torch", "fused", "bf16"),
    ]
    assert {MODEL_COURSE.rung_of(spec).slot for spec in alone} == {TORCH_ALONE}
    assert [r.name for r in MODEL_COURSE.visible_to_a_compiler(best)] == ["own-modules"]


def test_a_step_is_recorded_on_a_gpu_alone(gpu: Machine, cpu: Machine) -> None:
    recorded = next(rung for rung in MODEL_RUNGS if rung.name == "recorded-step")
    spec = ModelSpec("m", 4).with_(recorded.change)
    assert not spec.is_compiled
    assert recorded.unavailable(gpu, spec) is None
    assert recorded.unavailable(cpu, spec) == "CUDA graphs need a CUDA device"


def test_a_step_that_runs_eagerly_is_no_recorded_step() -> None:
    workload = ModelWorkload(made((Net(), tokens()), "m"), CPU)
    spec = ModelSpec("m", 4, 16, kernels="fuseline", execution="recorded")
    contender = workload.build(spec)
    with pytest.raises(InputError, match="it runs eagerly: the model is on cpu"):
        contender.warm_up(workload.batches(spec))


@pytest.mark.slow
def test_a_compiled_step_is_climbed_and_is_torch_alone(tmp_path):
    work = made((Net(), tokens()), "mine.py:make")
    outcome = ladder.run_model(settings(work, tmp_path, ()), lambda event: None)
    results = {result.name: result for result in outcome.results}
    assert results["inductor"].reason is None
    assert results["inductor"].value("grad_error") < 2e-2
    assert results[f"{TORCH_ALONE}: inductor"].value("paired_speedup") is not None


@pytest.mark.gpu
@pytest.mark.parametrize("own_loss", [False, True])
def test_all_rungs_on_a_gpu(own_loss, tmp_path):
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0])[0].flatten(0, 1), batch[1].flatten())

    work = made((Net(), tokens(), *([loss_fn] if own_loss else [])), "mine.py:make")
    outcome = ladder.run_model(settings(work, tmp_path, (), device="cuda"), lambda event: None)
    results = {result.name: result for result in outcome.results}
    assert results["recorded-step"].reason is None
    assert results["recorded-step"].value("grad_error") < 2e-2
    assert results["recorded-step"].value("peak_memory_gib") > 0
    assert outcome.torch_alone is not None
