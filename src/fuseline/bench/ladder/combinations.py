"""Named sets of runs: the seeds' ladders and the anchors' rows, so that the same thing can be run here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.rungs import NO_LEVER, Rung, why_not
from fuseline.bench.ladder.spec import RunSpec
from fuseline.errors import InputError

COMBINATION = "combination"  # the slot of all rows

# What nanoGPT's bench does in every row unless the row says otherwise.
NANOGPT: Mapping[str, Any] = {
    "precision": "bf16",
    "optimizer": "fused",
    "attention": "auto",
    "loss": "logits",
}


@dataclass(frozen=True)
class Row:
    """One run. `change` is put upon `NANOGPT`; `batch` only where the row is about another one."""

    name: str
    lever: str
    change: Mapping[str, Any]
    batch: int | None = None


@dataclass(frozen=True)
class Combination:
    """Rows by preset; those under `any` hold for every preset that has none of its own."""

    name: str
    mode: str
    summary: str
    rows: Mapping[str, tuple[Row, ...]]

    def rungs(self, preset: str, machine: Machine) -> list[Rung]:
        """The rows for `preset` as rungs of the slot `COMBINATION`; `InputError` if there are none."""
        rows = self.rows.get(preset) or self.rows.get("any")
        if rows is None:
            raise InputError(
                f"The combination {self.name!r} has no rows for the preset {preset!r}: it is about "
                f"{' and '.join(self.rows)}. Use --preset {next(iter(self.rows))}."
            )
        # On a CPU without fast bf16 the rows still say something about everything but precision.
        fallback = {"precision": "fp32", "loss": "float32"} if machine.bf16 is None else {}
        return [
            Rung(
                name=row.name,
                slot=COMBINATION,
                lever=row.lever,
                summary=", ".join(f"{k} {v}" for k, v in row.change.items()),
                change={**NANOGPT, **row.change, **fallback, **({"batch": row.batch} if row.batch else {})},
                unavailable=_spec_unavailable,
            )
            for row in rows
        ]


def _spec_unavailable(machine: Machine, spec: RunSpec) -> str | None:
    """Rungs speak for what they change; executions that only combinations have ask the machine here."""
    reason = why_not(spec, machine)
    if reason is None and spec.execution.startswith("max-autotune"):
        missing = machine.compiler_missing if machine.is_cuda else "it chooses among a GPU's kernels"
        reason = f"{spec.execution}: {missing}" if missing else None
    return reason


def _anchor(name: str, execution: str, attention: str, multiple: int, batch: int | None = None) -> Row:
    lever = NO_LEVER if (execution, attention) == ("eager", "naive") else "fuse"
    change = {"execution": execution, "attention": attention, "vocab_multiple": multiple}
    return Row(name, "overhead" if execution == "reduce-overhead" else lever, change, batch)


COMBINATIONS: tuple[Combination, ...] = (
    Combination(
        name="seed-001",
        mode="combination",
        summary="attention kernels and the padded vocabulary under torch.compile",
        rows={
            "any": (
                Row("naive", NO_LEVER, {"execution": "inductor", "attention": "naive"}),
                Row("math", "fuse", {"execution": "inductor", "attention": "math"}),
                Row("efficient", "fuse", {"execution": "inductor", "attention": "efficient"}),
                Row("flash", "fuse", {"execution": "inductor", "attention": "flash"}),
                Row(
                    "flash padded",
                    "tensor cores",
                    {"execution": "inductor", "attention": "flash", "vocab_multiple": 64},
                ),
            )
        },
    ),
    Combination(
        name="seed-003",
        mode="combination",
        summary="eager against the cudagraphs and inductor back ends, and inductor that tries its kernels",
        rows={
            "any": (
                Row("eager", NO_LEVER, {"execution": "eager", "vocab_multiple": 64}),
                Row("cudagraphs", "overhead", {"execution": "cudagraphs", "vocab_multiple": 64}),
                Row("inductor", "fuse", {"execution": "inductor", "vocab_multiple": 64}),
                Row(
                    "max-autotune-no-cudagraphs",
                    "fuse",
                    {"execution": "max-autotune-no-cudagraphs", "vocab_multiple": 64},
                ),
                Row("max-autotune", "overhead", {"execution": "max-autotune", "vocab_multiple": 64}),
            )
        },
    ),
    Combination(
        name="anchors",
        mode="anchor",
        summary="the rows that nanoGPT's own model was measured in on an H100",
        rows={
            "gpt2": (
                _anchor("eager naive 50257", "eager", "naive", 1),
                _anchor("eager math 50257", "eager", "math", 1),
                _anchor("eager efficient 50257", "eager", "efficient", 1),
                _anchor("eager flash 50257", "eager", "flash", 1),
                _anchor("eager flash 50304", "eager", "flash", 64),
                _anchor("eager cudnn 50304", "eager", "cudnn", 64),
                _anchor("inductor naive 50257", "inductor", "naive", 1),
                _anchor("inductor flash 50257", "inductor", "flash", 1),
                _anchor("inductor flash 50304", "inductor", "flash", 64),
                _anchor("inductor default 50304", "inductor", "auto", 64),
                _anchor("inductor cudnn 50304", "inductor", "cudnn", 64),
                _anchor("inductor reduce-overhead 50304", "reduce-overhead", "auto", 64),
                _anchor("inductor default 50304 B=32", "inductor", "auto", 64, batch=32),
                _anchor("inductor default 50304 B=64", "inductor", "auto", 64, batch=64),
            ),
            "shakespeare": (
                _anchor("eager naive", "eager", "naive", 1),
                _anchor("eager sdpa", "eager", "auto", 1),
                _anchor("cudagraphs", "cudagraphs", "auto", 1),
                _anchor("inductor", "inductor", "auto", 1),
                _anchor("inductor reduce-overhead", "reduce-overhead", "auto", 1),
            ),
        },
    ),
)


def find_combination(name: str) -> Combination | None:
    return next((combination for combination in COMBINATIONS if combination.name == name), None)
