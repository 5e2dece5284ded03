"""The op contract towards autograd, the dispatcher and the compiler, for every registered op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from fuseline.ops import Case, Op, registered

OPS = [pytest.param(op, id=op.name) for op in registered()]
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.label}".replace(" ", "_"))
    for op in registered()
    for case in op.cases
]


DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def draw(op: Op, case: Case, device: str = "cpu") -> dict[str, Any]:
    return op.inputs(case, torch.device(device), torch.float32, torch.Generator(device).manual_seed(0))


def differentiable(op: Op, arguments: dict[str, Any]) -> list[str]:
    given = {name: arguments.get(name) for name in op.differentiable}
    return [n for n, value in given.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]


class OurCalls(TorchDispatchMode):
    """Notes the calls of fuseline's operators that reach a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "fuseline":
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def backward_calls(self) -> list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]:
        return [call for call in self.calls if "backward" in call[0].name()]


def operator_arguments(overload: Any, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Named arguments as the operator's schema takes them."""
    positional, named = [], {}
    for parameter in overload._schema.arguments:
        if parameter.kwarg_only:
            if parameter.name in arguments:
                named[parameter.name] = arguments[parameter.name]
        else:
            positional.append(arguments.get(parameter.name, parameter.default_value))
    return positional, named


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_runs_natively(op: Op, device: str) -> None:
    with OurCalls() as seen:
        op.function(**draw(op, op.cases[0], device))
    assert [call[0].name() for call in seen.calls] == [f"fuseline::{op.name}"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op, case", CASES)
def test_passes_opcheck(op: Op, case: Case, device: str) -> None:
    arguments = draw(op, case, device)
    for name in differentiable(op, arguments):
        arguments[name].requires_grad_()
    overload = getattr(torch.ops.fuseline, op.name).default
    torch.library.opcheck(overload, *operator_arguments(overload, arguments))

    with OurCalls() as seen:
        op.function(**arguments).sum().backward()
    assert seen.backward_calls()
    for func, args, kwargs, _ in seen.backward_calls():
        torch.library.opcheck(func, args, kwargs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("op, case", CASES)
def test_computes_no_gradient_that_nobody_wants(op: Op, case: Case) -> None:
    arguments = draw(op, case)
    names = differentiable(op, arguments)

    def gradients_computed(requiring: list[str], wanted: list[str]) -> int:
        own = {
            name: value.detach().clone().requires_grad_() if name in requiring else value
            for name, value in arguments.items()
        }
        with OurCalls() as seen:
            torch.autograd.grad(op.function(**own).sum(), [own[name] for name in wanted])
        results = [call[3] for call in seen.backward_calls()]
        flat = [r for result in results for r in (result if isinstance(result, tuple) else (result,))]
        return sum(r is not None for r in flat)

    for name in names:
        assert gradients_computed([name], [name]) == 1, f"only {name} requires one"
        assert gradients_computed(names, [name]) == 1, f"only {name}'s is asked for"


@pytest.mark.parametrize("op", OPS)
def test_refuses_the_second_derivative_and_nothing_before_it(op: Op) -> None:
    arguments = draw(op, op.cases[0])
    arguments["x"].requires_grad_()
    out = op.function(**arguments)
    (grad,) = torch.autograd.grad(out.square().sum(), arguments["x"], create_graph=True)
    assert grad.isfinite().all()
    with pytest.raises(NotImplementedError, match=rf"{op.name} has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("op", OPS)
def test_needs_no_graph_without_gradients(op: Op) -> None:
    arguments = draw(op, op.cases[0])
    arguments["x"].requires_grad_()
    with torch.no_grad():
        assert op.function(**arguments).grad_fn is None
    with torch.inference_mode():
        assert op.function(**draw(op, op.cases[0])).is_inference()


def with_sizes(op: Op, step: int) -> Callable[[], dict[str, Any]]:
    """Arguments of the op's first plain matrix case, each size `step` larger."""
    case = next(c for c in op.cases if len(c.shape) == 2 and not c.options)
    shape = tuple(size + step for size in case.shape)
    return lambda: draw(op, replace(case, shape=shape))


@pytest.mark.parametrize("op", OPS)
def test_compiles_to_one_graph_for_all_shapes(op: Op) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(op.function, fullgraph=True, dynamic=True, backend=counter)
    for step in (0, 1, 2, 5, 11):
        arguments = with_sizes(op, step)()
        assert torch.equal(compiled(**arguments), op.function(**arguments))
    assert counter.frame_count == 1


@pytest.mark.parametrize("op", OPS)
def test_compiled_backward_is_one_graph_for_all_shapes(op: Op) -> None:
    """Through AOTAutograd, which runs the Meta kernels of both directions under symbolic shapes."""
    torch._dynamo.reset()
    compiled = torch.compile(op.function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in (0, 1, 2, 5, 11):
            arguments = with_sizes(op, step)()
            names = differentiable(op, arguments)
            for name in names:
                arguments[name].requires_grad_()
            inputs = [arguments[name] for name in names]
            ours = torch.autograd.grad(compiled(**arguments).square().sum(), inputs)
            wanted = torch.autograd.grad(op.function(**arguments).square().sum(), inputs)
            for one, other in zip(ours, wanted, strict=True):
                assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("op", OPS)
def test_runs_under_inductor(op: Op) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda **arguments: op.function(**arguments) * 2, fullgraph=True)
    arguments = draw(op, op.cases[0])
    arguments["x"].requires_grad_()
    (ours,) = torch.autograd.grad(compiled(**arguments).square().sum(), arguments["x"])
    (wanted,) = torch.autograd.grad((op.function(**arguments) * 2).square().sum(), arguments["x"])
    torch.testing.assert_close(ours, wanted)
