"""The stages of a compilation in words, and all of it as text for a terminal."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fuseline.profiling.lowering import Lowered


@dataclass(frozen=True)
class Told:
    """A stage's heading, who makes it, and what it is."""

    tool: str
    heading: str
    words: str


STAGES: dict[str, Told] = {
    "captured": Told(
        "TorchDynamo",
        "The captured graph",
        "Dynamo runs the Python bytecode with stand-ins for tensors and writes down each call of torch. "
        "Parameters and inputs become arguments.",
    ),
    "guards": Told(
        "TorchDynamo",
        "The guards",
        "What Dynamo took for granted: shapes, dtypes, devices, flags. Each call checks them, and a guard "
        "that fails compiles anew.",
    ),
    "joint": Told(
        "AOTAutograd",
        "The joint graph",
        "Forward and backward in one graph, traced through autograd ahead of time, in the smaller set of "
        "ATen operations that decompositions leave.",
    ),
    "forward": Told(
        "AOTAutograd",
        "The forward graph",
        "The partitioner's half that computes the outputs, and what backward needs: it may keep a tensor or "
        "have it computed again.",
    ),
    "backward": Told(
        "AOTAutograd",
        "The backward graph",
        "The other half: from the gradients of the outputs (tangents) and what forward kept to the gradients "
        "of the inputs.",
    ),
    "forward optimized": Told(
        "TorchInductor",
        "The forward graph after inductor's passes",
        "Patterns are replaced and dead work is removed; this is what becomes code.",
    ),
    "backward optimized": Told(
        "TorchInductor",
        "The backward graph after inductor's passes",
        "The same for the backward graph.",
    ),
    "forward code": Told(
        "TorchInductor",
        "The forward code",
        "The kernels that inductor wrote (C++ for a processor, Triton for a GPU) and the function that calls "
        "them.",
    ),
    "backward code": Told("TorchInductor", "The backward code", "The same for the backward graph."),
    "ptx": Told(
        "Triton",
        "PTX of one kernel",
        "What Triton's compiler makes of a kernel: the GPU's virtual assembly, which ptxas turns into "
        "machine code.",
    ),
}
_LEAF = re.compile(r"^[| ]*\+- (?P<kind>\w+): (?P<what>.*)")
_SHOWN = ("TENSOR_MATCH", "EQUALS_MATCH", "LENGTH_CHECK")
TOOLS = ("TorchDynamo", "AOTAutograd", "TorchInductor", "Triton")


def counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def summary(lowered: Lowered) -> str:
    """One line: operations captured, after autograd, and kernels."""
    parts = [
        f"{counted(sum(s.operations or 0 for s in lowered.of(key)), 'operation')} {where}"
        for key, where in (
            ("captured", "captured"),
            ("joint", "in the joint graph"),
            ("forward", "forward"),
            ("backward", "backward"),
        )
        if lowered.of(key)
    ]
    return f"{', '.join(parts)}; {counted(len(lowered.fusions), 'kernel call')}."


def text_of(lowered: Lowered) -> str:
    """All stages, one below the other, as a terminal shows them."""
    lines = [f"{lowered.name} on {lowered.environment.device}: {summary(lowered)}"]
    if lowered.source:
        lines += _part("The source", "", lowered.source)
    for broken in lowered.graph_breaks:
        lines += ["", f"Graph break at {broken.place}: {broken.reason}"]
    for tool in TOOLS:
        for key, told in STAGES.items():
            if told.tool == tool:
                for stage in lowered.of(key):
                    text = guards_in_short(stage.text) if key == "guards" else stage.text
                    lines += _part(f"{tool}: {told.heading}", told.words, text)
        if tool == "TorchInductor" and lowered.fusions:
            lines += ["", "TorchInductor: What is in each kernel", ""]
            lines += [f"  {one.kernel}: {', '.join(one.operations)}" for one in lowered.fusions]
    return "\n".join(lines)


def guards_in_short(text: str) -> str:
    """The guards of tensors and constants, a line each, and how many others there are."""
    leaves = [m for line in text.splitlines() if (m := _LEAF.match(line)) and m["kind"] != "GuardManager"]
    shown = [f"{m['kind']}: {m['what'].partition('  #')[0].strip()}" for m in leaves if m["kind"] in _SHOWN]
    return "\n".join([*shown, f"and {counted(len(leaves) - len(shown), 'other')}, of modules and flags"])


def _part(heading: str, words: str, text: str) -> list[str]:
    return ["", heading, "=" * len(heading), *([words] if words else []), "", text]
