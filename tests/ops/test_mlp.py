"""The MLP where kernels have GELU at the ends of its products, against float64 and against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fuseline import ops
from fuseline.nn.feed_forward import feed_forward
from fuseline.ops.mlp import reference

# rows, C, F and D: whole tiles, rows and columns that end inside one, and widths whose last step is none.
SHAPES = [(16384, 768, 3072, 768), (20011, 800, 2056, 776), (9001, 768, 3080, 1608)]


def draw(
    device: str, dtype: torch.dtype, rows: int, width: int, inner: int, out: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The op's tensors, and a gradient of what it returns."""
    generator = torch.Generator(device).manual_seed(0)

    def of(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    weight_1, weight_2 = of(inner, width, scale=width**-0.5), of(out, inner, scale=inner**-0.5)
    given = [of(rows, width), weight_1, of(inner), weight_2, of(out)]
    return [tensor.requires_grad_() for tensor in given], of(rows, out)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(found.double() - wanted) / torch.linalg.vector_norm(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_as_near_as_torch_by_many_rows(
    shape: tuple[int, int, int, int], dtype: torch.dtype, approximate: str
) -> None:
    given, grad_out = draw("cuda", dtype, *shape)
    y = ops.mlp(*given, approximate)
    grads = torch.autograd.grad(y, given, grad_out)
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    exact = reference(*wide, approximate)
    exact_grads = torch.autograd.grad(exact, wide, grad_out.double())
    plain = reference(*given, approximate)
    plain_grads = torch.autograd.grad(plain, given, grad_out)
    for ours, theirs, wanted in zip((y, *grads), (plain, *plain_grads), (exact, *exact_grads), strict=True):
        assert ours.dtype is dtype
        assert error(ours, wanted) <= 1.2 * error(theirs, wanted)


@pytest.mark.gpu
def test_many_rows_are_repeatable() -> None:
    given, grad_out = draw("cuda", torch.bfloat16, *SHAPES[1])

    def once() -> list[torch.Tensor]:
        y = ops.mlp(*given)
        return [y, *torch.autograd.grad(y, given, grad_out)]

    for first, second in zip(once(), once(), strict=True):
        assert torch.equal(first, second)
    with torch.no_grad():
        assert torch.equal(ops.mlp(*given), once()[0])


@pytest.mark.gpu
@pytest.mark.parametrize("biases", [(False, True), (False, False)])
def test_many_rows_without_biases(biases: tuple[bool, bool]) -> None:
    given, grad_out = draw("cuda", torch.bfloat16, *SHAPES[0])
    x, weight_1, _, weight_2, bias_2 = given
    last = bias_2 if biases[1] else None
    wanted = [x, weight_1, weight_2, *([bias_2] if biases[1] else [])]
    ours = torch.autograd.grad(ops.mlp(x, weight_1, None, weight_2, last), wanted, grad_out)
    theirs = torch.autograd.grad(reference(x, weight_1, None, weight_2, last), wanted, grad_out)
    for found, other in zip(ours, theirs, strict=True):
        assert error(found, other.double()) < 1e-2


@pytest.mark.gpu
def test_many_rows_at_odd_addresses() -> None:
    given, _ = draw("cuda", torch.bfloat16, *SHAPES[0])
    odd = []
    for tensor in given:
        moved = torch.empty(tensor.numel() + 1, device="cuda", dtype=tensor.dtype)[1:].view(tensor.shape)
        odd.append(moved.copy_(tensor.detach()).requires_grad_())
    grads = [torch.autograd.grad(ops.mlp(*tensors).sum(), tensors) for tensors in (given, odd)]
    for first, second in zip(*grads, strict=True):
        assert error(first, second.double()) < 1e-2


def test_feed_forward_computes_in_autocasts_dtype() -> None:
    first, second = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
    x = torch.randn(5, 16)
    torch.testing.assert_close(feed_forward(x, first, second, "none"), second(F.gelu(first(x))))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = feed_forward(x, first, second)
        y.sum().backward()
    assert y.dtype is torch.bfloat16
    assert first.weight.grad is not None
    assert first.weight.grad.dtype is torch.float32


def test_what_does_not_fit_is_refused() -> None:
    given, _ = draw("cpu", torch.float32, 5, 16, 32, 8)
    x, weight_1, bias_1, weight_2, bias_2 = given
    with pytest.raises(ValueError, match=r"they are \[\.\.\., C\], \[F, C\] and \[D, F\]"):
        ops.mlp(x, weight_1.t(), bias_1, weight_2, bias_2)
    with pytest.raises(ValueError, match="bias_2 has shape"):
        ops.mlp(x, weight_1, bias_1, weight_2, bias_1)
    with pytest.raises(ValueError, match="approximate is 'sigmoid'"):
        ops.mlp(x, weight_1, bias_1, weight_2, bias_2, "sigmoid")
    with pytest.raises(TypeError, match="weight_2 is Half and x Float"):
        ops.mlp(x, weight_1, bias_1, weight_2.half(), bias_2)
