"""Modules that make the tables of rotary embeddings, which attention's own code turns queries and keys by."""

from __future__ import annotations

import torch
from torch import nn

from fuseline.acceleration.reading import name_of, stripped, value_of
from fuseline.acceleration.recipe import Refusal, Verdict
from fuseline.acceleration.trace import Trace
from fuseline.acceleration.wide import run_wide

REASON = (
    "it makes tables of cosines and sines, and no function was found that turns queries and keys by them: "
    "Fuseline's rope takes the place of such a function"
)
HALVES, PAIRS, ONCE = "halves", "pairs", "once"
"""How a table holds its angles: all of them twice, each one twice, or each once."""


def recognize(trace: Trace, module: nn.Module) -> Verdict:
    """Cosine and sine of the same angles, each perhaps times a number."""
    return None if _places(trace) is None else Refusal("rotary", REASON)


def read_tables(trace: Trace) -> tuple[int, str] | None:
    """Which of the two outputs the cosines are, and how both tables hold the angles."""
    places = _places(trace)
    if places is None or len(trace.outputs) != 2:
        return None
    tables = _tables_of_random_numbers(trace)
    return places["cos"], next(layout for layout in (HALVES, PAIRS, ONCE) if _has(tables, layout))


def _places(trace: Trace) -> dict[str, int] | None:
    roots, places = {}, {}
    for place, output in enumerate(trace.outputs):
        node = stripped(output)
        if name_of(node) == "mul":
            node = stripped(node.args[0])
        if name_of(node) in ("cos", "sin"):
            roots[name_of(node)], places[name_of(node)] = stripped(node.args[0]), place
    return places if len(roots) == 2 and roots["cos"] is roots["sin"] else None


def _tables_of_random_numbers(trace: Trace) -> list[torch.Tensor]:
    """With random numbers for all that the module reads, what is equal in its tables always is."""
    generator = torch.Generator().manual_seed(23)
    sources = []
    for node in trace.graph.graph.nodes:
        if node.op == "placeholder":
            value = value_of(node)
            drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64)
            sources.append(
                (drawn if value.is_floating_point() else (drawn * 97).to(value.dtype)).to(value.device)
            )
    with torch.no_grad():
        return run_wide(trace, sources)


def _has(tables: list[torch.Tensor], layout: str) -> bool:
    if layout == ONCE:
        return True
    for table in tables:
        width = table.shape[-1]
        if width % 2:
            return False
        one, other = table.chunk(2, -1) if layout == HALVES else (table[..., ::2], table[..., 1::2])
        if not torch.equal(one, other):
            return False
    return True
