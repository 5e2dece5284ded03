"""Modules that make the tables of rotary embeddings: found, and left with the reason."""

from __future__ import annotations

from torch import nn

from fuseline.acceleration.reading import name_of, stripped
from fuseline.acceleration.recipe import Refusal, Verdict
from fuseline.acceleration.trace import Trace

REASON = (
    "it makes tables of cosines and sines, which the attention's own code turns queries and keys by: "
    "Fuseline's rope takes the place of both at once or of none"
)


def recognize(trace: Trace, module: nn.Module) -> Verdict:
    """Cosine and sine of the same angles, each perhaps times a number."""
    roots = {}
    for output in trace.outputs:
        node = stripped(output)
        if name_of(node) == "mul":
            node = stripped(node.args[0])
        if name_of(node) in ("cos", "sin"):
            roots[name_of(node)] = stripped(node.args[0])
    return Refusal("rotary", REASON) if len(roots) == 2 and roots["cos"] is roots["sin"] else None
