"""The second baseline: the best that torch can do alone, as one who knows torch would write it."""

from __future__ import annotations

from collections.abc import Collection

from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.rungs import NO_LEVER, Rung, why_not
from fuseline.bench.ladder.spec import RunSpec

TORCH_ALONE = "torch alone"  # the slot of its rungs
EXECUTIONS = ("inductor", "reduce-overhead", "eager")
AUTOTUNED = "max-autotune"  # compiles for minutes, and is timed where it is asked for
TORCHS_BEST = "torch's best"  # the slot of the rung with which a climb goes on where torch alone is ahead
# What torch alone is not timed with, besides kernels of ours.
NOT_TORCHS = ("pick", "inductor-graph", "recorded-step")
TORCH_ATTENTION = ("naive", "math", "efficient", "flash", "cudnn", "auto", "flex")


def executions(machine: Machine, *, autotuned: bool) -> tuple[str, ...]:
    """What may carry out a step of torch alone. `autotuned`: max-autotune too, on a GPU."""
    able = autotuned and machine.is_cuda and not machine.compiler_missing
    return (*EXECUTIONS, AUTOTUNED) if able else EXECUTIONS


def modes_told(timed: Collection[str]) -> str:
    """In words, of which modes torch alone is the best, and which one of a GPU's was not timed."""
    words = f"Torch alone was timed as {' and '.join(timed)}"
    missing = "reduce-overhead" in timed and AUTOTUNED not in timed
    return words + (f", not as {AUTOTUNED}, which --{AUTOTUNED} adds." if missing else ".")


def torch_alone(best: RunSpec, machine: Machine, *, autotuned: bool = False) -> list[RunSpec]:
    """What to measure for it, given the best spec that a climb found: the same precision, vocabulary and
    loss where they are torch's, SDPA, the fused AdamW, and every mode of torch.compile that runs here (eager
    only where none does). On a CPU, where SDPA in 16 bits can be slower than the formula written out, both,
    the one that the climb ended with first."""
    plain = best.with_(
        {
            "loss": best.loss if best.loss in ("float32", "logits") else "float32",
            "optimizer": "fused",
            "kernels": "torch",
        }
    )
    attention = best.attention if best.attention in TORCH_ATTENTION[1:] else "auto"
    attentions = [attention, "naive"] if machine.device == "cpu" else [attention]
    if best.attention not in TORCH_ATTENTION[1:]:
        attentions.reverse()
    specs = [
        plain.with_({"attention": attention, "execution": execution})
        for execution in executions(machine, autotuned=autotuned)
        for attention in attentions
    ]
    able = [spec for spec in specs if why_not(spec, machine) is None]
    return [spec for spec in able if spec.is_compiled] or able


def rung_of(spec: RunSpec) -> Rung:
    """One such spec as a rung, for the table."""
    is_written_out = spec.attention == "naive"
    attention = "attention written out" if is_written_out else "SDPA"
    padded = "padded vocabulary, " if spec.vocab_multiple > 1 else ""
    told = f"{spec.precision}, {attention}, {padded}fused AdamW, {spec.execution}"
    name = f"{TORCH_ALONE}: {spec.execution}" + (", no SDPA" if is_written_out else "")
    return Rung(name, TORCH_ALONE, NO_LEVER, told, {}, unavailable=lambda machine, spec: None)


def taken_over(name: str) -> Rung:
    """The rung of a climb that goes on from such a spec, whose rung has `name`."""
    told = name.replace(f"{TORCH_ALONE}:", "torch's")
    summary = "torch alone is ahead of what the climb kept, and it goes on from there"
    return Rung(told, TORCHS_BEST, "fuse", summary, {}, unavailable=lambda machine, spec: None)


def is_ours(rung: Rung) -> bool:
    """Whether torch alone is without it."""
    return rung.lever == "custom kernels" or rung.name in NOT_TORCHS
