"""What inductor fuses, where graphs break and why code is compiled again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fuseline.profiling import profile_step
from fuseline.profiling.ceilings import Ceilings
from fuseline.profiling.compiled import CompilationWatch, Fusion, clean_path
from fuseline.profiling.explained import fused
from fuseline.profiling.pieces import Piece


@pytest.mark.parametrize(
    "path, clean",
    [
        ("L['self'].transformer.h.0.ln_1", "transformer.h.0.ln_1"),
        ("L['self']", ""),
        ("G['model'].layers.1", "layers.1"),
        ("L['self']._modules['up']", "up"),
        ("L['self'].transformer.h._modules['0'].mlp", "transformer.h.0.mlp"),
    ],
)
def test_inductors_paths_become_the_models_own(path: str, clean: str):
    assert clean_path(path) == clean


def fusion(kernel: str, place: str, graph: int = 0) -> Fusion:
    return Fusion(kernel, graph, ("add",), (place,), 8)


def test_the_calls_of_a_kernel_are_told_in_their_order():
    told = [fusion("triton_poi_fused_add_0", "first"), fusion("triton_poi_fused_add_0", "second")]
    pieces = [Piece("triton_poi_fused_add_0", i, i + 1, 1) for i in range(2)]
    found = fused([pieces[0], Piece("nvjet", 5, 6, 1), pieces[1]], told)
    assert {position: f.places for position, f in found.items()} == {0: ("first",), 2: ("second",)}


def test_of_code_that_was_compiled_again_the_last_runs():
    told = [fusion("triton_poi_fused_add_0", "old", 0), fusion("triton_poi_fused_add_0", "new", 1)]
    found = fused([Piece("triton_poi_fused_add_0", 0, 1, 1)], told)
    assert found[0].places == ("new",)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.tail = nn.Sequential(nn.LayerNorm(64), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.up(x)).square().mean()


@pytest.mark.slow
def test_a_compiled_step_says_what_was_fused_and_where():
    torch.compiler.reset()
    model = Model()
    compiled: Any = torch.compile(model)
    x = torch.randn(64, 32)
    ceilings = Ceilings(10.0, {"fp32": 0.1})
    profile = profile_step(lambda: compiled(x).backward(), "cpu", model=model, ceilings=ceilings, steps=2)
    norms = [f for f in profile.fusions if f.is_generated and "native_layer_norm" in f.operations]
    assert "gelu" in norms[0].operations
    assert norms[0].places[:2] == ("tail.0", "tail.1")
    # Forward: its input, weight and bias, the mean's result and the statistics; nothing between is written.
    once = 64 * 64 * 4
    assert once <= norms[0].bytes <= 2.2 * once
    rows = [row for row in profile.by_kernel() if row.name.startswith("cpp_fused") and row.kind == "norms"]
    assert any("tail" in row.places for row in rows)
    assert all(row.floor_ms for row in rows)
    assert profile.graph_breaks == ()
    assert profile.recompilations == ()


@pytest.mark.slow
def test_breaks_and_recompilations_are_heard_with_their_reasons(capsys):
    torch.compiler.reset()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    compiled: Any = torch.compile(step)
    with CompilationWatch() as watch:
        for rows in (4, 8):
            compiled(torch.randn(rows, 16))
    assert [b.place.rpartition(":")[0] for b in watch.graph_breaks] == [__file__]
    assert "User-inserted graph break" in watch.graph_breaks[0].reason
    assert {r.function for r in watch.recompilations} >= {"step"}
    assert "size mismatch at index 0. expected 4, actual 8" in watch.recompilations[0].reason
    assert "graph break" not in capsys.readouterr().err.lower()
    # What was switched on is off again.
    assert "recompiles" not in torch._logging._internal.log_state.artifact_names
