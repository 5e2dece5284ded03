"""rope of queries and keys together: the bits of rope by itself, both ways, however the two differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.optests import opcheck

from fuseline import native, ops
from fuseline.ops.rope import rope_angles, rope_pair

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Shape = tuple[int, ...]

QUERIES_AND_KEYS: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "as many heads": ((2, 4, 33, 64), (2, 4, 33, 64), {}),
    "fewer keys": ((2, 8, 33, 64), (2, 2, 33, 64), {}),
    "one head of keys": ((2, 6, 130, 80), (2, 1, 130, 80), {"dims": 32}),
    "tokens before heads": ((2, 33, 8, 64), (2, 33, 2, 64), {"seq_dim": -3}),
    "interleaved": ((2, 8, 33, 64), (2, 2, 33, 64), {"interleaved": True}),
    "odd heads": ((2, 3, 7, 9), (2, 2, 7, 9), {"interleaved": True}),
    "far positions": ((2, 8, 5, 64), (2, 2, 5, 64), {"positions": torch.tensor([[7, 100_000, 3, 0, 9]] * 2)}),
    "no heads of keys": ((2, 3, 7, 16), (2, 0, 7, 16), {}),
    "three dimensions": ((8, 33, 64), (2, 33, 64), {}),
    "many tokens": ((2, 8, 700, 64), (2, 2, 700, 64), {}),
    "another size of heads": ((2, 3, 7, 16), (2, 2, 7, 32), {}),
    "other tokens": ((2, 3, 7, 16), (2, 3, 9, 16), {}),
    "other dimensions": ((2, 3, 7, 16), (3, 7, 16), {}),
}


def drawn(
    shape: Shape, device: str, dtype: torch.dtype = torch.float32, *, swapped: bool = False
) -> torch.Tensor:
    x = torch.randn(shape, device=device).to(dtype)
    if swapped:  # heads and tokens are swapped in memory
        x = x.transpose(-2, -3).contiguous().transpose(-2, -3)
    return x.requires_grad_()


def moved(options: dict[str, Any], device: str) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", QUERIES_AND_KEYS)
def test_it_has_the_bits_of_rope(name: str, device: str) -> None:
    of_q, of_k, given = QUERIES_AND_KEYS[name]
    options = moved(given, device)
    for dtype in DTYPES:
        for swapped in (False, True):
            q, k = drawn(of_q, device, dtype, swapped=swapped), drawn(of_k, device, dtype, swapped=swapped)
            both, alone = rope_pair(q, k, **options), [ops.rope(x, **options) for x in (q, k)]
            slopes = [torch.randn_like(y) for y in both]
            grads = torch.autograd.grad(both, (q, k), slopes)
            expected = torch.autograd.grad(alone, (q, k), slopes)
            for mine, other in zip((*both, *grads), (*alone, *expected), strict=True):
                assert torch.equal(mine, other)
                assert mine.stride() == other.stride()


@pytest.mark.parametrize("device", DEVICES)
def test_tables_and_parts_of_one_product(device: str) -> None:
    angles = rope_angles(torch.arange(50, device=device), 32, 500.0)
    tables = angles.cos().float(), angles.sin().float()
    product = torch.randn(2, 33, 6, 32, device=device, requires_grad=True)
    q, k = product[:, :, :4].transpose(1, 2), product[:, :, 4:].transpose(1, 2)
    both, alone = rope_pair(q, k, *tables), [ops.rope(x, *tables) for x in (q, k)]
    assert all(map(torch.equal, both, alone))
    (grad,) = torch.autograd.grad([y.square().sum() for y in both], product)
    (expected,) = torch.autograd.grad([y.square().sum() for y in alone], product)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_of_one(device: str) -> None:
    q, k = drawn((2, 4, 9, 16), device), drawn((2, 2, 9, 16), device)
    for x, number in ((q, 0), (k, 1)):
        (expected,) = torch.autograd.grad(ops.rope(x).square().sum(), x)
        (grad,) = torch.autograd.grad(rope_pair(q, k)[number].square().sum(), x)  # nothing comes to the other
        assert torch.equal(grad, expected)
    turned = rope_pair(q, k.detach())
    (grad,) = torch.autograd.grad(sum(y.square().sum() for y in turned), q)
    assert torch.equal(grad, torch.autograd.grad(ops.rope(q).square().sum(), q)[0])
    loss = sum(y.square().sum() for y in rope_pair(q, k))
    (grad,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"fuseline.ops.rope has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_frozen_stays_so(device: str) -> None:
    q, k = drawn((2, 4, 9, 16), device), drawn((2, 2, 9, 16), device)
    assert [y.requires_grad for y in rope_pair(q, k.detach())] == [True, False]
    assert [y.requires_grad for y in rope_pair(q.detach(), k)] == [False, True]


@pytest.mark.filterwarnings("ignore:fuseline.ops.rope:RuntimeWarning")  # which says that the reference runs
def test_forward_mode_and_torch_func_run_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSELINE_STRICT", raising=False)
    q, k = (drawn(shape, "cpu").detach() for shape in ((2, 4, 9, 16), (2, 2, 9, 16)))
    for how in ({}, {"interleaved": True, "positions": torch.arange(9) + 3, "dims": 8}):

        def by_itself(q: torch.Tensor, k: torch.Tensor, how: Any = how) -> tuple[torch.Tensor, ...]:
            return ops.rope(q, **how), ops.rope(k, **how)

        def together(q: torch.Tensor, k: torch.Tensor, how: Any = how) -> tuple[torch.Tensor, ...]:
            return rope_pair(q, k, **how)

        found, wanted = (torch.func.jvp(f, (q, k), (k.sum() * q, k)) for f in (together, by_itself))
        assert all(map(torch.equal, (*found[0], *found[1]), (*wanted[0], *wanted[1])))
        grads = [
            torch.func.grad(lambda q, f=f: sum(y.square().sum() for y in f(q, k)))(q)
            for f in (together, by_itself)
        ]
        assert torch.equal(*grads)


def test_two_dtypes() -> None:
    q, k = drawn((2, 4, 9, 16), "cpu", torch.bfloat16), drawn((2, 2, 9, 16), "cpu", torch.float64)
    assert all(map(torch.equal, rope_pair(q, k), (ops.rope(q), ops.rope(k))))


def test_refusals_are_those_of_rope() -> None:
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    with pytest.raises(ValueError, match=r"dims is 3.*dims is even"):
        rope_pair(q, k, dims=3)
    with pytest.raises(ValueError, match=r"positions have shape \[4\]"):
        rope_pair(q, k, positions=torch.arange(4))
    with pytest.raises(ValueError, match="given both or not at all"):
        rope_pair(q, k, torch.ones(9, 8))


@pytest.mark.parametrize("device", DEVICES)
def test_as_an_op_of_torch(device: str) -> None:
    assert native.ready(device)
    opcheck(torch.ops.fuseline.rope_pair, (drawn((2, 4, 9, 16), device), drawn((2, 2, 9, 16), device)))
    grads = drawn((2, 4, 9, 16), device).detach(), drawn((2, 2, 9, 16), device).detach()
    opcheck(torch.ops.fuseline.rope_pair_backward, (*grads, None, None, None, 10.0, True, None, -2))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the profiler, on its cycles
def test_one_launch_each_way() -> None:
    q, k = drawn((2, 8, 33, 64), "cuda", torch.bfloat16), drawn((2, 2, 33, 64), "cuda", torch.bfloat16)
    slopes = torch.randn_like(q), torch.randn_like(k)
    rope_pair(q, k)
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        torch.autograd.grad(rope_pair(q, k), (q, k), slopes)
        torch.cuda.synchronize()
    assert sum(event.count for event in profile.key_averages() if "rope<" in event.key) == 2
