"""Softmax and layer_norm over drawn shapes, layouts, scales and masks, against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseline import ops
from fuseline.ops.layer_norm import reference as layer_norm_reference
from fuseline.ops.softmax import reference as softmax_reference

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SIZES = st.sampled_from([0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normal values of a drawn spread, in memory of a drawn order, step and offset."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 2])) for _ in shape]
    room = torch.empty([shape[d] * steps[d] + 1 for d in order], dtype=dtype)
    view = room[tuple(slice(1, 1 + shape[d] * steps[d], steps[d]) for d in order)]
    back = [order.index(d) for d in range(len(shape))]
    spread = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    values = (torch.randn(shape, generator=generator) * spread).to(dtype)
    return view.permute(back).copy_(values)


def assert_same_both_ways(ours: torch.Tensor, wanted: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance)
    grad_out = torch.linspace(-1, 1, max(1, ours.numel()))[: ours.numel()].reshape(ours.shape).to(ours.dtype)
    found = torch.autograd.grad(ours, leaves, grad_out)
    expected = torch.autograd.grad(wanted, leaves, grad_out)
    for one, other in zip(found, expected, strict=True):
        largest = float(other.abs().max()) if other.numel() else 0.0
        # A gradient of a broadcast tensor sums many terms, which may cancel: rounding grows with their root.
        terms = ours.numel() / max(1, other.numel())
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * max(1.0, largest, terms**0.5))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=DTYPES, rank=st.integers(1, 4))
def test_softmax_over_any_dimension(data: st.DataObject, dtype: torch.dtype, rank: int) -> None:
    shape = tuple(data.draw(SIZES) if i < 2 else data.draw(st.integers(1, 4)) for i in range(rank))
    x = data.draw(tensors(shape, dtype)).requires_grad_()
    dim = data.draw(st.integers(-rank, rank - 1))
    scale = data.draw(st.sampled_from([1.0, 0.125, -2.0]))
    wanted = softmax_reference(x, dim, scale=scale)
    assert_same_both_ways(ops.softmax(x, dim, scale=scale), wanted, [x])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=DTYPES, causal=st.booleans(), kind=st.sampled_from(["none", "bool", "additive"]))
def test_softmax_with_masks(data: st.DataObject, dtype: torch.dtype, causal: bool, kind: str) -> None:
    shape = (*(data.draw(st.integers(1, 3)) for _ in range(2)), data.draw(SIZES), data.draw(SIZES))
    x = data.draw(tensors(shape, dtype)).requires_grad_()
    leaves, mask = [x], None
    if kind != "none":
        kept = data.draw(st.integers(0, 4))
        mask_shape = tuple(1 if data.draw(st.booleans()) else size for size in shape)[4 - kept :]
        mask = data.draw(tensors(mask_shape, dtype))
        if kind == "bool":
            mask = mask > 0
        else:
            leaves.append(mask.requires_grad_())
    wanted = softmax_reference(x, causal=causal, mask=mask)
    assert_same_both_ways(ops.softmax(x, causal=causal, mask=mask), wanted, leaves)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), dtype=DTYPES, depth=st.integers(1, 2), affine=st.sampled_from(["none", "same", "float32"])
)
def test_layer_norm(data: st.DataObject, dtype: torch.dtype, depth: int, affine: str) -> None:
    shape = (data.draw(SIZES), data.draw(st.integers(1, 5)), data.draw(SIZES.filter(bool)))
    x = data.draw(tensors(shape, dtype)).requires_grad_()
    leaves, weight, bias = [x], None, None
    if affine != "none":
        kind = dtype if affine == "same" else torch.float32
        weight = data.draw(tensors(shape[-depth:], kind)).requires_grad_()
        bias = data.draw(tensors(shape[-depth:], kind)).requires_grad_()
        leaves += [weight, bias]
    wanted = layer_norm_reference(x, shape[-depth:], weight, bias, 1e-3)
    assert_same_both_ways(ops.layer_norm(x, shape[-depth:], weight, bias, 1e-3), wanted, leaves)


@pytest.mark.parametrize("function", [ops.softmax, softmax_reference])
def test_blind_rows_are_zero_and_so_are_their_gradients(function: object) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[2] = False
    y = function(x, mask=mask)
    (grad,) = torch.autograd.grad(y, x, torch.randn(4, 6))
    assert torch.equal(y[2], torch.zeros(6))
    assert torch.equal(grad[2], torch.zeros(6))
    torch.testing.assert_close(y.sum(-1), torch.tensor([1.0, 1.0, 0.0, 1.0]))
