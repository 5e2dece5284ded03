"""What a norm keeps for its backward: what was normalized, or its own result where that is enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseline import ops

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
NORMS = ("add_layer_norm", "add_rms_norm", "dropout_add_layer_norm", "dropout_add_rms_norm")
ROWS, N = 40, 96


def run(
    name: str, device: str, *, stream: torch.dtype = torch.float32, weighted: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the sum."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, N, device=device, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.randn(ROWS, N, device=device, dtype=stream, requires_grad=True)
    given: dict[str, Any] = {"weight": torch.ones(N, device=device)} if weighted else {}
    if "layer" in name:
        given["normalized_shape"] = (N,)
    if "dropout" in name:
        given |= {"p": 0.25, "seed": torch.tensor([3], device=device)}
    y, total = getattr(ops, name)(x, residual, eps=1e-5, **given)
    return y, total


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    "stream, weighted, of_y",
    [(torch.float32, False, True), (torch.float32, True, False), (torch.bfloat16, False, False)],
    ids=["float32 stream", "weighted", "one dtype"],
)
def test_keeps_its_result_or_the_sum(
    name: str, device: str, stream: torch.dtype, weighted: bool, of_y: bool
) -> None:
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, total = run(name, device, stream=stream, weighted=weighted)
    large = [(each.data_ptr(), each.dtype) for each in kept if each.numel() == ROWS * N]
    wanted = y if of_y else total
    assert large == [(wanted.data_ptr(), wanted.dtype)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NORMS)
def test_a_result_that_was_changed_is_noticed(name: str, device: str) -> None:
    y, total = run(name, device)
    with torch.no_grad():
        total.zero_()  # which is not kept
    (y.float().sum() + total.sum()).backward()
    y, total = run(name, device)
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (y.float().sum() + total.sum()).backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_gradients_of_a_narrowed_norm(shift: float, out_dtype: torch.dtype, device: str) -> None:
    """Where the mean is far larger than the deviation, and some columns than others."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, N, device=device) + shift
    x[:, 5] *= 30
    x.requires_grad_()
    grad_y = torch.randn(ROWS, N, device=device).to(out_dtype)
    y = ops.layer_norm(x, (N,), out_dtype=out_dtype)
    (found,) = torch.autograd.grad(y, x, grad_y)
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(ops.layer_norm(wide, (N,)), wide, grad_y.double())
    error = torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact)
    assert found.dtype is torch.float32
    assert error < torch.finfo(out_dtype).eps / 4
