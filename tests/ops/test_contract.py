"""The op contract, for every registered op, case, dtype and device. See design: "The op contract"."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseline import native
from fuseline.ops import Case, Op
from fuseline.ops.op import outputs

from .recorded import recorded
from .registered_cases import CASES, DEVICES, OPS, differentiable

CPU_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def draw(op: Op, case: Case, device: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    return op.inputs(case, torch.device(device), dtype, torch.Generator(device).manual_seed(seed))


def to_double(arguments: dict[str, Any]) -> dict[str, Any]:
    """In float64, dtypes that are asked for, too."""
    floating = {
        n: v.double() for n, v in arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
    }
    dtypes = {n: torch.float64 for n, v in arguments.items() if isinstance(v, torch.dtype)}
    return {**arguments, **floating, **dtypes}


def leaves(op: Op, arguments: dict[str, Any], names: list[str] | None = None) -> dict[str, Any]:
    """The arguments with fresh leaves for those that are differentiated (all that can be, or `names`)."""
    names = differentiable(op, arguments) if names is None else names
    return {
        name: value.detach().clone().requires_grad_() if name in names else value
        for name, value in arguments.items()
    }


def run(op: Op, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return outputs(op.function(**arguments))


def define(op: Op, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return outputs(op.reference(**arguments))


def gradients(
    op: Op, function: Any, arguments: dict[str, Any], grads_out: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Gradients of all that have one, for an incoming gradient of each floating output."""
    own = leaves(op, arguments)
    out = [o for o in outputs(function(**own)) if o.is_floating_point()]
    wanted = [own[n] for n in differentiable(op, arguments)]
    return list(torch.autograd.grad(out, wanted, list(grads_out)))


def gradients_for(out: tuple[torch.Tensor, ...], seed: int = 1) -> tuple[torch.Tensor, ...]:
    """A gradient for each floating output, drawn apart from the others."""
    return tuple(
        torch.randn(o.shape, generator=torch.Generator(o.device).manual_seed(seed + i), device=o.device).to(
            o.dtype
        )
        for i, o in enumerate(out)
        if o.is_floating_point()
    )


def poison(*out: torch.Tensor) -> None:
    """Leave NaN in the memory that the next allocations of these sizes are likely to get."""
    for _ in range(3):
        for o in out:
            if o.is_floating_point():
                torch.full_like(o, float("nan"))


def matrix_case(op: Op) -> Case:
    return next(c for c in op.cases if len(c.shape) == 2 and not c.options and min(c.shape) > 8)


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
    exact = define(op, to_double(arguments))
    plain = define(op, arguments)
    poison(*plain)
    for i, (ours, near, far) in enumerate(zip(run(op, arguments), plain, exact, strict=True)):
        assert_right(ours, near, far, dtype, f"output {i}")

    grads_out = gradients_for(plain)
    exact_grads = gradients(op, op.reference, to_double(arguments), tuple(g.double() for g in grads_out))
    plain_grads = gradients(op, op.reference, arguments, grads_out)
    poison(*plain_grads)
    our_grads = gradients(op, op.function, arguments, grads_out)
    names = differentiable(op, arguments)
    for name, ours, near, far in zip(names, our_grads, plain_grads, exact_grads, strict=True):
        assert_right(ours, near, far, dtype, f"gradient of {name}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op, case", CASES)
def test_is_repeatable(op: Op, case: Case, device: str) -> None:
    """The same bits every time, whatever the number of threads (but for torch's matrix products)."""
    arguments = draw(op, case, device, torch.float32)
    grads_out = gradients_for(run(op, arguments))
    threads = torch.get_num_threads()
    seen = []
    try:
        for count in (threads,) * 3 if op.by_blas else (1, threads + 1, threads):
            torch.set_num_threads(count)
            seen.append([*run(op, arguments), *gradients(op, op.function, arguments, grads_out)])
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

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return run(op, {**own, **dict(zip(names, values, strict=True))})

    values = tuple(own[n] for n in names)
    assert torch.autograd.gradcheck(function, values, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "stepped", "expanded"])
@pytest.mark.parametrize("op", OPS)
def test_takes_any_layout(op: Op, layout: str, device: str) -> None:
    """The same bits, but for a GPU's matrix products: what is not contiguous is read as if it were."""
    arguments = draw(op, matrix_case(op), device, torch.float32)
    expected = run(op, arguments)
    grads_out = gradients_for(expected)
    expected_grads = gradients(op, op.function, arguments, grads_out)
    relaid = {name: lay_out(v, layout) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    if layout == "expanded":  # the gradient of a sum arrives with stride 0
        grads_out = tuple(torch.ones((), device=device).expand(g.shape) for g in grads_out)
        contiguous = tuple(g.contiguous() for g in grads_out)
        expected_grads = gradients(op, op.function, arguments, contiguous)
    else:
        grads_out = tuple(lay_out(g, layout) for g in grads_out)
    assert not relaid[op.differentiable[0]].is_contiguous()
    assert not any(g.is_contiguous() for g in grads_out if g.dim() > 1)
    names = differentiable(op, arguments)
    own = {n: v.detach().requires_grad_() if n in names else v for n, v in relaid.items()}
    out = run(op, own)
    found = torch.autograd.grad([o for o in out if o.is_floating_point()], [own[n] for n in names], grads_out)
    for ours, wanted in zip((*out, *found), (*expected, *expected_grads), strict=True):
        if op.by_blas and device == "cuda":  # which may add up what is turned in another order
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
        else:
            assert torch.equal(ours, wanted)


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, laid out in memory another way; a scalar has only one.

    None is contiguous: contiguous memory at an odd address may be summed in another order.
    """
    if x.dim() == 0:
        return x
    if layout == "sliced" and x.dim() > 1:
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
    """Contiguous, so that nobody copies it, but no vector load is aligned: sums may take another order."""
    arguments = draw(op, matrix_case(op), device, dtype)
    grads_out = gradients_for(run(op, arguments))
    wanted = [*run(op, arguments), *gradients(op, op.function, arguments, grads_out)]
    odd = {name: misalign(v) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    names = differentiable(op, odd)

    def once() -> list[torch.Tensor]:
        own = {n: v.detach().requires_grad_() if n in names else v for n, v in odd.items()}
        out = run(op, own)
        floating = [o for o in out if o.is_floating_point()]
        grads = torch.autograd.grad(floating, [own[n] for n in names], [misalign(g) for g in grads_out])
        return [*(o.detach() for o in out), *grads]

    found = once()
    tolerance = 4 * torch.finfo(dtype).eps
    for ours, other, again in zip(found, wanted, once(), strict=True):
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))
        assert torch.equal(ours, again)


def misalign(x: torch.Tensor) -> torch.Tensor:
    """A copy whose address is no multiple of 16 bytes."""
    view = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    assert view.is_contiguous()
    assert view.data_ptr() % 16
    return view


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_nan_stays_in_its_row(op: Op, device: str) -> None:
    """NaN is where the reference has it; outputs that have the input's rows keep the others to the bit."""
    arguments = draw(op, matrix_case(op), device, torch.float32)
    clean = run(op, arguments)
    name = op.differentiable[0]
    rows = arguments[name].shape[0]
    for value in (float("nan"), float("inf")):
        bad = {**arguments, name: arguments[name].clone()}
        bad[name][3, 5] = value
        for out, before, wanted in zip(run(op, bad), clean, define(op, bad), strict=True):
            assert torch.equal(out.isnan(), wanted.isnan())
            if out.shape[:1] == (rows,):
                assert not torch.equal(out[3], before[3])
                assert torch.equal(out[4:], before[4:])
                assert torch.equal(out[:3], before[:3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_keeps_its_dtype_under_autocast_or_casts(op: Op, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        arguments = draw(op, op.cases[0], device, dtype)
        computed_in = torch.bfloat16 if op.casts else dtype
        cast = {k: v.to(computed_in) if k in op.differentiable else v for k, v in arguments.items()}
        expected = run(op, cast)
        with torch.autocast(device, dtype=torch.bfloat16):
            for ours, wanted in zip(run(op, arguments), expected, strict=True):
                assert torch.equal(ours, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("op, case", CASES)
def test_is_captured_in_a_cuda_graph(op: Op, case: Case) -> None:
    """Forward and backward, replayed over inputs that were not there at capture."""
    arguments = leaves(op, draw(op, case, "cuda", torch.bfloat16, seed=0))
    fresh = draw(op, case, "cuda", torch.bfloat16, seed=7)
    names = differentiable(op, arguments)
    grads_out = gradients_for(run(op, fresh))

    def step() -> list[torch.Tensor]:
        out = run(op, arguments)
        floating = [o for o in out if o.is_floating_point()]
        grads = torch.autograd.grad(floating, [arguments[n] for n in names], list(grads_out))
        return [*(o.detach() for o in out), *grads]

    graph, captured = recorded(step)
    with torch.no_grad():
        for name, value in fresh.items():
            if isinstance(value, torch.Tensor):
                arguments[name].copy_(value)
    graph.replay()
    expected = [*run(op, fresh), *gradients(op, op.function, fresh, grads_out)]
    for ours, wanted in zip(captured, expected, strict=True):
        assert torch.equal(ours, wanted)
