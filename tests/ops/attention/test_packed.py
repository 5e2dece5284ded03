"""`attention_packed`: the numbers of `attention` over views, and a gradient that is one tensor."""

from __future__ import annotations

import pytest
import torch

from fuseline import native, ops
from fuseline.errors import InputError
from fuseline.ops.attention import choice
from fuseline.ops.attention.choice import Decision
from fuseline.ops.attention.problem import Problem

CASES = [
    pytest.param(4, 4, {"causal": True}, id="causal"),
    pytest.param(4, 2, {}, id="shared key heads"),
    pytest.param(4, 1, {"causal": True, "window": (3, 0), "softmax_scale": 0.3}, id="window"),
    pytest.param(2, 2, {"softmax_scale": -0.5}, id="negative scale"),
]


def _qkv(
    heads: int, kv_heads: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(2, 19, (heads + 2 * kv_heads) * 16, generator=generator)
    return drawn.requires_grad_()


def _apart(qkv: torch.Tensor, heads: int, kv_heads: int, **options: object) -> torch.Tensor:
    q, k, v = qkv.unflatten(2, (-1, 16)).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    return ops.attention(q, k, v, **options).transpose(1, 2).flatten(2)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("backend", ["math", "fuseline"])
@pytest.mark.parametrize("heads, kv_heads, options", CASES)
def test_numbers_are_those_of_attention(heads: int, kv_heads: int, options: dict, backend: str) -> None:
    if backend == "fuseline" and not native.ready("cpu"):
        pytest.skip("the native library is not loaded")
    qkv = _qkv(heads, kv_heads)
    wide = qkv.detach().double().requires_grad_()
    y = ops.attention_packed(qkv, heads, kv_heads, backend=backend, **options)
    wanted = _apart(wide, heads, kv_heads, backend="math", **options)
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad(y, qkv, grad_y)
    (wanted_grad,) = torch.autograd.grad(wanted, wide, grad_y.double())
    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=2e-6)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=0, atol=4e-6)


@pytest.mark.skipif(not native.ready("cpu"), reason="the native library is not loaded")
def test_the_operator_passes_torchs_checks() -> None:
    arguments = (_qkv(4, 2), None, None, 4, 2, 2, -1, -1, 0.25, 0.0, 0.0)
    torch.library.opcheck(torch.ops.fuseline.attention_packed.default, arguments)


@pytest.mark.skipif(not native.ready("cpu"), reason="the native library is not loaded")
def test_a_second_derivative_is_refused() -> None:
    qkv = _qkv(2, 2)
    y = ops.attention_packed(qkv, 2, backend="fuseline")
    (grad,) = torch.autograd.grad(y.sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="attention"):
        grad.sum().backward()


def test_other_forms_are_refused() -> None:
    with pytest.raises(InputError, match=r"\[B, T, \(4 \+ 2 \* 2\) \* D\]"):
        ops.attention_packed(torch.zeros(2, 3, 20), 4, 2)
    with pytest.raises(InputError, match="do not divide"):
        ops.attention_packed(torch.zeros(2, 3, 16), 3, 2)


def test_the_pick_counts_the_pass_that_puts_gradients_together() -> None:
    q = torch.empty(8, 12, 1024, 64, device="meta", dtype=torch.bfloat16)
    problem = Problem(
        *(torch.device("cuda"), torch.bfloat16, *q.shape[:2], 12, 1024, 1024, 64, "fwbw", "bottom_right"),
        *(-1, -1, "none", "", 0, 0, 0, False, False, 0.0, False, False, False),
    )
    close = Decision(problem, "cudnn", "measured", times_us={"cudnn": 180.0, "fuseline": 185.0})
    far = Decision(problem, "cudnn", "measured", times_us={"cudnn": 180.0, "fuseline": 260.0})
    assert choice._name_of(close, packed=False) == "cudnn"
    assert choice._name_of(close, packed=True) == "fuseline"  # 38 MB read and written are 25 us
    assert choice._name_of(far, packed=True) == "cudnn"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend", ["fuseline", "cudnn", "flash", "cudnn_fuseline", "flash_fuseline", "pick"]
)
@pytest.mark.parametrize("length", [64, 256, 1000, 1024])
def test_on_a_gpu(backend: str, length: int) -> None:
    H, D = 6, 64
    qkv = torch.randn(3, length, 3 * H * D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wide = qkv.detach().double().requires_grad_()
    y = ops.attention_packed(qkv, H, causal=True, backend=backend)
    q, k, v = wide.unflatten(2, (-1, D)).transpose(1, 2).split([H, H, H], dim=1)
    wanted = ops.attention(q, k, v, causal=True, backend="math").transpose(1, 2).flatten(2)
    grad_y = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, qkv, grad_y)
    (wanted_grad,) = torch.autograd.grad(wanted, wide, grad_y.double())
    assert (y.double() - wanted).norm() / wanted.norm() < 5e-3
    assert (grad.double() - wanted_grad).norm() / wanted_grad.norm() < 8e-3
