"""The second baseline: the best that torch can do alone, as one who knows torch would write it."""

from __future__ import annotations

from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.rungs import NO_LEVER, Rung, why_not
from fuseline.bench.ladder.spec import RunSpec

TORCH_ALONE = "torch alone"  # the slot of its rungs
EXECUTIONS = ("inductor", "reduce-overhead", "eager")
TORCH_ATTENTION = ("naive", "math", "efficient", "flash", "cudnn", "auto", "flex")


def torch_alone(best: RunSpec, machine: Machine) -> list[RunSpec]:
    """What to measure for it, given the best spec that a climb found: the same precision, vocabulary and
    loss where they are torch's, SDPA, the fused AdamW, and every mode of torch.compile that runs here (eager
    only where none does)."""
    plain = best.with_(
        {
            "attention": best.attention if best.attention in TORCH_ATTENTION[1:] else "auto",
            "loss": best.loss if best.loss in ("float32", "logits") else "float32",
            "optimizer": "fused",
            "kernels": "torch",
        }
    )
    specs = [plain.with_({"execution": execution}) for execution in EXECUTIONS]
    able = [spec for spec in specs if why_not(spec, machine) is None]
    return [spec for spec in able if spec.is_compiled] or able


def rung_of(spec: RunSpec) -> Rung:
    """One such spec as a rung, for the table."""
    told = f"{spec.precision}, SDPA, fused AdamW, {spec.execution}"
    name = f"{TORCH_ALONE}: {spec.execution}"
    return Rung(name, TORCH_ALONE, NO_LEVER, told, {}, unavailable=lambda machine, spec: None)
