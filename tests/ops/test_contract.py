"""The op contract, for every registered op, case, dtype and device. See design: "The op contract"."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseline import native
from fuseline.ops import Case, Op, registered

CPU_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


OPS = [pytest.param(op, id=op.name) for op in registered()]
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.label}".replace(" ", "_"))
    for op in registered()
    for case in op.cases
]


def draw(op: Op, case: Case, device: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    return op.inputs(case, torch.device(device), dtype, torch.Generator(device).manual_seed(seed))


def to_double(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def differentiable(op: Op, arguments: dict[str, Any]) -> list[str]:
    given = {name: arguments.get(name) for name in op.differentiable}
    return [n for n, value in given.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]


def leaves(op: Op, arguments: dict[str, Any], names: list[str] | None = None) -> dict[str, Any]:
    """The arguments with fresh leaves for those that are differentiated (all that can be, or `names`)."""
    names = differentiable(op, arguments) if names is None else names
    return {
        name: value.detach().clone().requires_grad_() if name in names else value
        for name, value in arguments.items()
    }


def gradients(op: Op, function: Any, arguments: dict[str, Any], grad_out: torch.Tensor) -> list[torch.Tensor]:
    own = leaves(op, arguments)
    out = function(**own)
    return list(torch.autograd.grad(out, [own[n] for n in differentiable(op, arguments)], grad_out))


def gradient_for(out: torch.Tensor, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator(out.device).manual_seed(seed)
    return torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)


def poison(out: torch.Tensor) -> None:
    """Leave NaN in the memory that the next allocation of this size is likely to get."""
    for _ in range(3):
        torch.full_like(out, float("nan"))


def assert_right(
    ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, what: str
) -> None:
    """Error at most twice that of plain PyTorch plus one ulp of the op's dtype; as a norm and at the worst.

    A float32 mask's gradient comes from an output that was kept in the op's own dtype: hence `dtype`.
    """
    assert ours.shape == plain.shape, what
    assert ours.dtype == plain.dtype, what
    assert not ours.isnan().any(), f"{what}: NaN"
    if exact.numel() == 0:
        return
    ulp = torch.finfo(dtype).eps
    if dtype == torch.float64:  # the reference itself is of this precision, and judges no finer
        ulp *= 32
    for measure in (torch.linalg.vector_norm, lambda x: x.abs().max()):
        bound = 2 * measure(plain.double() - exact) + ulp * measure(exact)
        error = measure(ours.double() - exact)
        assert error <= bound, f"{what}: error {error:.3e}, at most {bound:.3e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
@pytest.mark.parametrize("op, case", CASES)
def test_is_right(op: Op, case: Case, dtype: torch.dtype, device: str) -> None:
    assert native.ready(device), "the contract is for native ops; see `fuseline doctor`"
    arguments = draw(op, case, device, dtype)
    exact = op.reference(**to_double(arguments))
    plain = op.reference(**arguments)
    poison(plain)
    assert_right(op.function(**arguments), plain, exact, dtype, "forward")

    grad_out = gradient_for(plain)
    exact_grads = gradients(op, op.reference, to_double(arguments), grad_out.double())
    plain_grads = gradients(op, op.reference, arguments, grad_out)
    poison(plain_grads[0])
    our_grads = gradients(op, op.function, arguments, grad_out)
    names = differentiable(op, arguments)
    for name, ours, near, far in zip(names, our_grads, plain_grads, exact_grads, strict=True):
        assert_right(ours, near, far, dtype, f"gradient of {name}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op, case", CASES)
def test_is_repeatable(op: Op, case: Case, device: str) -> None:
    """The same bits every time, whatever the number of threads."""
    arguments = draw(op, case, device, torch.float32)
    grad_out = gradient_for(op.function(**arguments))
    threads = torch.get_num_threads()
    seen = []
    try:
        for count in (1, threads + 1, threads):
            torch.set_num_threads(count)
            seen.append([op.function(**arguments), *gradients(op, op.function, arguments, grad_out)])
    finally:
        torch.set_num_threads(threads)
    for again in seen[1:]:
        for first, other in zip(seen[0], again, strict=True):
            assert torch.equal(first, other)


def has_finite_differences(op: Op, case: Case) -> bool:
    """Small enough, at a scale where they keep their digits, and without a mask of -inf."""
    arguments = draw(op, case, "cpu", torch.float64)
    tensors = [v for v in arguments.values() if isinstance(v, torch.Tensor)]
    plain = not {"spread", "offset"} & set(case.options)
    return plain and sum(t.numel() for t in tensors) < 5000 and all(bool(t.isfinite().all()) for t in tensors)


@pytest.mark.parametrize("op, case", [p for p in CASES if has_finite_differences(*p.values)])
def test_passes_gradcheck(op: Op, case: Case) -> None:
    arguments = draw(op, case, "cpu", torch.float64)
    names = differentiable(op, arguments)
    own = leaves(op, to_double(arguments), names)

    def function(*values: torch.Tensor) -> torch.Tensor:
        return op.function(**{**own, **dict(zip(names, values, strict=True))})

    values = tuple(own[n] for n in names)
    assert torch.autograd.gradcheck(function, values, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "stepped", "expanded"])
@pytest.mark.parametrize("op", OPS)
def test_takes_any_layout(op: Op, layout: str, device: str) -> None:
    case = next(c for c in op.cases if len(c.shape) == 2 and not c.options and min(c.shape) > 8)
    arguments = draw(op, case, device, torch.float32)
    expected = op.function(**arguments)
    grad_out = gradient_for(expected)
    expected_grads = gradients(op, op.function, arguments, grad_out)
    relaid = {name: lay_out(v, layout) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    if layout == "expanded":  # the gradient of a sum arrives with stride 0
        grad_out = torch.ones((), device=device).expand(expected.shape)
        expected_grads = gradients(op, op.function, arguments, grad_out.contiguous())
    else:
        grad_out = lay_out(grad_out, layout)
    assert not any(v.is_contiguous() for v in (relaid["x"], grad_out))
    assert torch.equal(op.function(**relaid), expected)
    names = differentiable(op, arguments)
    own = {n: v.detach().requires_grad_() if n in names else v for n, v in relaid.items()}
    found = torch.autograd.grad(op.function(**own), [own[n] for n in names], grad_out)
    for ours, wanted in zip(found, expected_grads, strict=True):
        assert torch.equal(ours, wanted)


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, laid out in memory another way."""
    if layout == "sliced":  # starts one element in: misaligned for vector loads
        room = x.new_empty((*x.shape[:-1], x.shape[-1] + 3))
        view = room[..., 1 : 1 + x.shape[-1]]
    elif layout == "transposed" and x.dim() > 1:
        view = x.new_empty((x.shape[-1], *x.shape[:-1])).movedim(0, -1)
    else:
        view = x.new_empty((*x.shape, 2))[..., 0]
    return view.copy_(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_takes_memory_at_odd_addresses(op: Op, dtype: torch.dtype, device: str) -> None:
    """Contiguous, so that nobody copies it, but no vector load is aligned."""
    case = next(c for c in op.cases if len(c.shape) == 2 and not c.options and min(c.shape) > 8)
    arguments = draw(op, case, device, dtype)
    grad_out = gradient_for(op.function(**arguments))
    wanted = [op.function(**arguments), *gradients(op, op.function, arguments, grad_out)]
    odd = {name: misalign(v) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    names = differentiable(op, odd)
    own = {n: v.requires_grad_() if n in names else v for n, v in odd.items()}
    out = op.function(**own)
    found = [out.detach(), *torch.autograd.grad(out, [own[n] for n in names], misalign(grad_out))]
    tolerance = 4 * torch.finfo(dtype).eps
    for ours, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


def misalign(x: torch.Tensor) -> torch.Tensor:
    view = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    assert view.is_contiguous()
    assert view.data_ptr() % 16
    return view


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_nan_stays_in_its_row(op: Op, device: str) -> None:
    case = next(c for c in op.cases if len(c.shape) == 2 and not c.options and min(c.shape) > 8)
    arguments = draw(op, case, device, torch.float32)
    clean = op.function(**arguments)
    for value in (float("nan"), float("inf")):
        bad = {**arguments, "x": arguments["x"].clone()}
        bad["x"][3, 5] = value
        out = op.function(**bad)
        assert torch.equal(out.isnan(), op.reference(**bad).isnan())
        assert out[3].isnan().any()
        assert torch.equal(out[4:], clean[4:])
        assert torch.equal(out[:3], clean[:3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_keeps_its_dtype_under_autocast(op: Op, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        arguments = draw(op, op.cases[0], device, dtype)
        expected = op.function(**arguments)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert torch.equal(op.function(**arguments), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("op, case", CASES)
def test_is_captured_in_a_cuda_graph(op: Op, case: Case) -> None:
    """Forward and backward, replayed over inputs that were not there at capture."""
    arguments = leaves(op, draw(op, case, "cuda", torch.bfloat16, seed=0))
    fresh = draw(op, case, "cuda", torch.bfloat16, seed=7)
    names = differentiable(op, arguments)
    grad_out = gradient_for(op.function(**fresh))

    def step() -> list[torch.Tensor]:
        out = op.function(**arguments)
        return [out.detach(), *torch.autograd.grad(out, [arguments[n] for n in names], grad_out)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for name, value in fresh.items():
            if isinstance(value, torch.Tensor):
                arguments[name].copy_(value)
    graph.replay()
    expected = [op.function(**fresh), *gradients(op, op.function, fresh, grad_out)]
    for ours, wanted in zip(captured, expected, strict=True):
        assert torch.equal(ours, wanted)
