"""The op contract towards autograd, the dispatcher and the compiler, for every registered op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from fuseline.ops import Case, Op
from fuseline.ops.op import Outputs, outputs

from .registered_cases import CASES, DEVICES, OPS, differentiable


def draw(op: Op, case: Case, device: str = "cpu") -> dict[str, Any]:
    return op.inputs(case, torch.device(device), torch.float32, torch.Generator(device).manual_seed(0))


def total(returned: Outputs, power: int = 1) -> torch.Tensor:
    """A scalar of all floating outputs, for gradients that reach each of them."""
    floating = [out for out in outputs(returned) if out.is_floating_point()]
    return torch.stack([out.pow(power).sum() if power > 1 else out.sum() for out in floating]).sum()


def assert_equal(ours: Outputs, wanted: Outputs) -> None:
    for one, other in zip(outputs(ours), outputs(wanted), strict=True):
        assert torch.equal(one, other)


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
        total(op.function(**arguments)).backward()
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
            torch.autograd.grad(total(op.function(**own)), [own[name] for name in wanted])
        results = [call[3] for call in seen.backward_calls()]
        flat = [r for result in results for r in (result if isinstance(result, tuple) else (result,))]
        return sum(r is not None for r in flat)

    for name in names:
        assert gradients_computed([name], [name]) == 1, f"only {name} requires one"
        assert gradients_computed(names, [name]) == 1, f"only {name}'s is asked for"


@pytest.mark.parametrize("op", OPS)
def test_refuses_the_second_derivative_and_nothing_before_it(op: Op) -> None:
    arguments = draw(op, op.cases[0])
    leaf = arguments[op.differentiable[0]].requires_grad_()
    (grad,) = torch.autograd.grad(total(op.function(**arguments), 2), leaf, create_graph=True)
    assert grad.isfinite().all()
    with pytest.raises(NotImplementedError, match=rf"{op.name} has no second derivative"):
        grad.sum().backward()


def second_derivatives(
    function: Callable[..., Outputs], arguments: dict[str, Any], names: list[str]
) -> dict[tuple[str, str], bool]:
    """Whether the gradient of one depends on the other, for each two; refusals count.

    The gradients of the outputs are constant, so that nothing of it comes from them.
    """
    own = {n: v.detach().clone().requires_grad_() if n in names else v for n, v in arguments.items()}
    out = [o for o in outputs(function(**own)) if o.requires_grad]
    generator = torch.Generator().manual_seed(1)
    grads_out = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in out]
    grads = torch.autograd.grad(out, [own[n] for n in names], grads_out, create_graph=True)
    depends = {}
    for name, grad in zip(names, grads, strict=True):
        factor = torch.randn(grad.shape, generator=generator).to(
            grad.dtype
        )  # a softmax's gradients sum to zero
        for other in names:
            depends[name, other] = False
            if not grad.requires_grad:
                continue
            try:
                (second,) = torch.autograd.grad(
                    grad, own[other], factor, retain_graph=True, allow_unused=True
                )
                depends[name, other] = second is not None and bool(second.abs().gt(1e-6).any())
            except NotImplementedError:
                depends[name, other] = True
    return depends


@pytest.mark.parametrize("op, case", CASES)
def test_refuses_second_derivatives_by_all_they_depend_on(op: Op, case: Case) -> None:
    arguments = draw(op, case)
    all_names = differentiable(op, arguments)
    for names in [[name] for name in all_names] + [all_names] * (len(all_names) > 1):
        ours = second_derivatives(op.function, arguments, names)
        wanted = second_derivatives(op.reference, arguments, names)
        assert not [pair for pair, depends in wanted.items() if depends and not ours[pair]], names


@pytest.mark.parametrize("op", OPS)
def test_needs_no_graph_without_gradients(op: Op) -> None:
    arguments = draw(op, op.cases[0])
    arguments[op.differentiable[0]].requires_grad_()
    with torch.no_grad():
        assert all(out.grad_fn is None for out in outputs(op.function(**arguments)))
    with torch.inference_mode():
        assert all(out.is_inference() for out in outputs(op.function(**draw(op, op.cases[0]))))


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
        assert_equal(compiled(**arguments), op.function(**arguments))
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
            ours = torch.autograd.grad(total(compiled(**arguments), 2), inputs)
            wanted = torch.autograd.grad(total(op.function(**arguments), 2), inputs)
            assert_equal(ours, wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("op", OPS)
def test_runs_under_inductor(op: Op) -> None:
    torch._dynamo.reset()

    def doubled(**arguments: Any) -> Outputs:
        return tuple(out * 2 if out.is_floating_point() else out for out in outputs(op.function(**arguments)))

    compiled = torch.compile(doubled, fullgraph=True)
    arguments = draw(op, op.cases[0])
    leaf = arguments[op.differentiable[0]].requires_grad_()
    (ours,) = torch.autograd.grad(total(compiled(**arguments), 2), leaf)
    (wanted,) = torch.autograd.grad(total(doubled(**arguments), 2), leaf)
    torch.testing.assert_close(ours, wanted)
