"""Where others lead: every measured case in which the fastest peer beats Fuseline, by subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fuseline.records import Record
from fuseline.records.record import Scalar
from tables.markdown import PEERS, named, table

LEAD = 0.97
"""A peer leads where its time or memory is below this share of ours."""
MEASURES = {
    "time_us": "time",
    "iteration_ms": "time",
    "epoch_s": "time",
    "ttft_ms": "time to the first token",
    "peak_memory_gib": "memory",
}
OTHERS = (*PEERS, "cudagraphs", "mha")
SHOWN = ("rows", "n", "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "embed_dim", "m", "k")
NOT_OURS = ("picker", "lstm")
"""Sections that measure how good a pick is, which has a table of its own, and an example."""
Case = tuple[tuple[str, Scalar], ...]


@dataclass
class Subject:
    """The cases of one op or model in one direction, and the shares of those in which a peer leads."""

    cases: int = 0
    behind: list[tuple[float, str, Case]] = field(default_factory=list)


def behind(records: Sequence[Record]) -> list[str]:
    """One line a subject in which a peer leads anywhere."""
    body = []
    for (name, measure, device), subject in sorted(_subjects(records).items()):
        if subject.behind:
            share, peer, case = min(subject.behind, key=lambda one: one[0])
            count = f"{len(subject.behind)} of {subject.cases}"
            size = _size(dict(case))
            body.append([name, measure, device, count, f"{share:.2f}", named(peer), size])
    head = ["", "measure", "device", "cases in which a peer leads", "its least share of ours", "who", "there"]
    return table(head, body, left=3)


def _subjects(records: Sequence[Record]) -> dict[tuple[str, str, str], Subject]:
    values: dict[tuple[str, str, str, Case], dict[str, float]] = {}
    for r in sorted(records, key=lambda r: r.time):
        if r.metric in MEASURES and r.value and r.case.get("section") not in NOT_OURS:
            case = tuple(sorted(r.case.items()))
            values.setdefault((r.device, r.suite, r.metric, case), {})[r.peer] = r.value
    subjects: dict[tuple[str, str, str], Subject] = {}
    for (device, suite, metric, case), found in values.items():
        ours = [value for peer, value in found.items() if peer.startswith("fuseline")]
        others = {peer: value for peer, value in found.items() if peer in OTHERS}
        if ours and others:
            key = _name(suite, dict(case)), MEASURES[metric], device.removeprefix("NVIDIA ")
            subject = subjects.setdefault(key, Subject())
            best = min(others, key=lambda peer: others[peer])
            subject.cases += 1
            if others[best] < LEAD * min(ours):
                subject.behind.append((others[best] / min(ours), best, case))
    return subjects


_SUITES = {
    "step": "whole training step",
    "acceleration": "accelerated model",
    "translation": "translation model",
    "decode": "generation",
    "linear": "linear layer for few rows",
}
_SECTIONS = {
    "short": "attention, short sequences, our kernel",
    "long": "attention, long sequences, our kernel",
    "drawn": "attention, drawn lengths, our kernel",
    "decode": "attention over a cache, our kernel",
    "masks": "attention with masks, our kernel",
    "small": "whole small attention layer",
}
_DIRECTIONS = {"fw": "forward", "bw": "backward", "fwbw": "forward and backward"}


def _name(suite: str, case: dict[str, Scalar]) -> str:
    if suite == "attention":
        what = _SECTIONS[str(case["section"])]
    elif suite == "ops":
        what = f"`{case['op']}`"
    else:
        what = _SUITES[suite]
    direction = _DIRECTIONS.get(str(case.get("direction")))
    return f"{what}, {direction}" if direction else what


def _size(case: dict[str, Scalar]) -> str:
    named_by = [str(case[key]) for key in ("preset", "model", "format") if key in case]
    sizes = " x ".join(f"{case[key]:,}" for key in SHOWN if isinstance(case.get(key), int))
    dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(case.get("dtype")))
    return ", ".join([*named_by, *([sizes] if sizes else []), *([dtype] if dtype else []), *_forms(case)])


def _forms(case: dict[str, Scalar]) -> list[str]:
    causal = case.get("causal") not in (None, "none", False)
    return [*(["causal"] if causal else []), *(["in a graph"] if case.get("captured") else [])]
