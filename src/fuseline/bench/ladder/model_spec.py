"""What one rung runs of a model of the user's own, and the rungs for it, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fuseline.bench.ladder.course import Course
from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.rungs import NO_LEVER, Rung, find_rung, why_not
from fuseline.bench.ladder.torch_alone import TORCH_ALONE, executions
from fuseline.records.record import Scalar


@dataclass(frozen=True)
class ModelSpec:
    """A training step of a model on one batch. The defaults are the model as it came, with torch's AdamW.

    `preset` is what the model is called, `batch` and `seqlen` (None where the batch is not of tokens) are the
    sizes of its batch, `weights` their format: fp32, or as they came in 16 bits. `optimizer` is `unfused` or
    `fused`. `kernels` says whose code the modules run: their own (`torch`), or what `fuseline.accelerate` put
    in (`fuseline`). `execution` is one of `fuseline.training.execution`, or `recorded`: the handle's
    `training_step`.
    """

    preset: str
    batch: int
    seqlen: int | None = None
    weights: str = "fp32"
    precision: str = "fp32"
    optimizer: str = "unfused"
    kernels: str = "torch"
    execution: str = "eager"

    def with_(self, change: Mapping[str, Any]) -> ModelSpec:
        return replace(self, **change)

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile is at work."""
        return self.execution not in ("eager", RECORDED)

    def __str__(self) -> str:
        sizes = f"{self.batch} x {self.seqlen} tokens" if self.seqlen else f"{self.batch} examples"
        return f"{self.preset}, {sizes} a step"

    def same_work(self, other: object) -> bool:
        """Whether both train the same model on a batch of the same shape."""
        mine = (self.preset, self.batch, self.seqlen, self.weights)
        return isinstance(other, ModelSpec) and mine == (
            other.preset,
            other.batch,
            other.seqlen,
            other.weights,
        )

    def case(self) -> dict[str, Scalar]:
        """The spec under the records' canonical names."""
        case: dict[str, Scalar] = {
            "model": "user",
            "preset": self.preset,
            "batch": self.batch,
            "dtype": self.precision if self.weights == "fp32" else self.weights,
            "optimizer": self.optimizer,
            "kernels": self.kernels,
            "execution": self.execution,
        }
        return case if self.seqlen is None else {**case, "seqlen_q": self.seqlen}


RECORDED = "recorded"


def _of(name: str) -> Rung:
    found = find_rung(name)
    assert found is not None, name
    return found


def _narrower(name: str) -> Rung:
    """The rung of a number format, which weights in 16 bits have no use for."""
    rung = _of(name)

    def unavailable(machine: Machine, spec: ModelSpec) -> str | None:
        if spec.weights != "fp32":
            return f"the weights are {spec.weights} already"
        return rung.unavailable(machine, spec)

    return replace(rung, unavailable=unavailable)


def _native(machine: Machine, spec: ModelSpec) -> str | None:
    return machine.native_missing


def _recorded(machine: Machine, spec: ModelSpec) -> str | None:
    return _of("graph").unavailable(machine, spec) or machine.native_missing


MODEL_RUNGS: tuple[Rung, ...] = (
    _narrower("tf32"),
    _narrower("bf16"),
    _of("fp8"),
    _of("fused-adamw"),
    Rung(
        "own-modules",
        "modules",
        NO_LEVER,
        "every module runs its own code",
        {"kernels": "torch"},
        lambda machine, spec: None,
    ),
    Rung(
        "accelerate",
        "modules",
        "custom kernels",
        "fuseline.accelerate: modules that Fuseline's ops compute, each proved, swapped where it pays",
        {"kernels": "fuseline"},
        _native,
    ),
    _of("inductor"),
    _of("reduce-overhead"),
    Rung(
        "max-autotune",
        "execution",
        "overhead",
        "torch.compile(mode='max-autotune'): kernels tried out, and replayed as CUDA graphs; minutes",
        {"execution": "max-autotune"},
        _of("reduce-overhead").unavailable,
        named_on=("cpu", "cuda"),
    ),
    Rung(
        "recorded-step",
        "execution",
        "overhead",
        "training_step of fuseline.accelerate: the whole accelerated step in one CUDA graph",
        {"kernels": "fuseline", "execution": RECORDED},
        _recorded,
    ),
)


def _torch_alone(best: ModelSpec, machine: Machine, *, autotuned: bool = False) -> list[ModelSpec]:
    """The model's own modules in the best format, the fused AdamW, and every mode of torch.compile that runs
    here (eager only where none does)."""
    plain = best.with_({"optimizer": "fused", "kernels": "torch"})
    modes = executions(machine, autotuned=autotuned)
    specs = [plain.with_({"execution": execution}) for execution in modes]
    able = [spec for spec in specs if why_not(spec, machine, MODEL_RUNGS) is None]
    return [spec for spec in able if spec.is_compiled] or able


def _alone_as_rung(spec: ModelSpec) -> Rung:
    summary = f"{spec.case()['dtype']}, fused AdamW, {spec.execution}"
    name = f"{TORCH_ALONE}: {spec.execution}"
    return Rung(name, TORCH_ALONE, NO_LEVER, summary, {}, unavailable=lambda machine, spec: None)


def _visible_to_a_compiler(spec: ModelSpec) -> list[Rung]:
    return [rung for rung in MODEL_RUNGS if rung.name == "own-modules" and spec.kernels == "fuseline"]


MODEL_COURSE = Course(
    baseline=Rung(
        name="the model as it came",
        slot="baseline",
        lever=NO_LEVER,
        summary="the model's own code and number format, torch's own AdamW, eager",
        change={},
        unavailable=lambda machine, spec: None,
    ),
    rungs=MODEL_RUNGS,
    torch_alone=_torch_alone,
    rung_of=_alone_as_rung,
    visible_to_a_compiler=_visible_to_a_compiler,
)
