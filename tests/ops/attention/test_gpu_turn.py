"""A turn is held while a compiled function runs, and lent while torch compiles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from fuseline.ops.attention.gpu_turn import Turn, lent_while_compiling


class Told(Turn):
    """A turn that keeps a log of when it is held."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __enter__(self) -> None:
        self.log.append("held")

    def __exit__(self, *error: object) -> None:
        self.log.append("free")


@pytest.fixture
def turn() -> Told:
    torch.compiler.reset()
    return Told()


def logged(turn: Told, name: str, *, boxed: bool = False) -> Callable[..., Any]:
    """A backend that tells when it compiles and when what it compiled runs."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        turn.log.append(f"compiles {name}")

        def run(*args: torch.Tensor) -> Any:
            turn.log.append(f"runs {name}")
            return graph.forward(*args)

        return make_boxed_func(run) if boxed else run

    return compile_graph


def test_others_have_the_turn_while_it_compiles(turn: Told) -> None:
    doubled = torch.compile(lambda x: x * 2, backend=logged(turn, "double"))
    for _ in range(2):
        with lent_while_compiling(turn):
            doubled(torch.ones(3))
    first = ["held", "free", "compiles double", "held", "runs double", "free"]
    assert turn.log == [*first, "held", "runs double", "free"]
    doubled(torch.ones(3, 3))
    assert turn.log[-2:] == ["compiles double", "runs double"], "outside of it nothing is held"


def test_a_backward_that_is_compiled_late_lends_it_again(turn: Told) -> None:
    forward, backward = (logged(turn, name, boxed=True) for name in ("forward", "backward"))
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    function = torch.compile(lambda x: x.sin().sum(), backend=backend)
    with lent_while_compiling(turn):
        function(torch.ones(3, requires_grad=True)).backward()
    held = False
    for event in turn.log:
        held = event == "held" or (held and event != "free")
        if event.startswith("runs"):
            assert held, turn.log
        if event.startswith("compiles"):
            assert not held, turn.log
    assert {"compiles backward", "runs backward"} <= set(turn.log)


def test_what_does_not_compile_leaves_it_free(turn: Told) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise ValueError("no kernel")

    with pytest.raises(Exception, match="no kernel"), lent_while_compiling(turn):
        torch.compile(lambda x: x * 3, backend=broken)(torch.ones(3))
    assert turn.log == ["held", "free", "held", "free"]
