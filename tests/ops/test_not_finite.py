"""NaN and infinities: where torch has them and nowhere else; the random cases of the fuzz look further."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fuseline import ops

from .registered_cases import DEVICES

OPTIONS = [{"reduction": "mean"}, {"reduction": "sum"}, {"reduction": "none"}]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_size", [3, 128])
@pytest.mark.parametrize("rows", [0, 8])
@pytest.mark.parametrize("given", [1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["reduction"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_without_targets_poisons_no_weight(
    dtype: torch.dtype, options: dict[str, str], given: float, rows: int, chunk_size: int, device: str
) -> None:
    hidden = torch.randn(rows, 16, device=device).to(dtype).requires_grad_()
    weight = torch.randn(32, 16, device=device).to(dtype).requires_grad_()
    bias = torch.randn(32, device=device).to(dtype).requires_grad_()
    target = torch.full((rows,), -100, device=device)
    loss = ops.linear_cross_entropy(hidden, weight, target, bias, chunk_size=chunk_size, **options)
    theirs = F.cross_entropy(F.linear(hidden, weight, bias), target, **options)
    assert torch.equal(loss.isnan(), theirs.isnan())
    for grad in torch.autograd.grad(loss, (hidden, weight, bias), torch.full_like(loss, given)):
        assert grad.eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grad_in_forward", [False, True])
@pytest.mark.parametrize("given", [1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["reduction"])
def test_ignored_logits_have_no_gradient(
    options: dict[str, str], given: float, grad_in_forward: bool, device: str
) -> None:
    logits = torch.randn(4, 9, device=device)
    logits[1, 2] = torch.nan
    logits.requires_grad_()
    target = torch.full((4,), -100, device=device)
    loss = ops.cross_entropy(logits, target, grad_in_forward=grad_in_forward, **options)
    (grad,) = torch.autograd.grad(loss, logits, torch.full_like(loss, given))
    assert grad.eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("n", [5, 64, 1000, 5000])
def test_a_blind_row_of_softmax_keeps_nan_out_of_its_gradient(
    n: int, dtype: torch.dtype, device: str
) -> None:
    x = torch.randn(6, n, device=device).to(dtype).requires_grad_()
    mask = torch.ones(6, n, dtype=torch.bool, device=device)
    mask[2] = False
    mask[4, 1:] = False
    given = torch.randn(6, n, device=device).to(dtype)
    given[2], given[4, 3] = torch.nan, torch.inf
    (grad,) = torch.autograd.grad(ops.softmax(x, mask=mask), x, given)
    assert grad[2].eq(0).all()
    assert grad[4, 1:].eq(0).all()
    assert grad[[0, 1, 3, 5]].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["add_rms_norm", "dropout_add_rms_norm"])
def test_epsilon_is_that_of_x(op: str, device: str) -> None:
    """Beside a stream of float32, too."""
    x = torch.full((2, 64), 1e-3, dtype=torch.float16, device=device)
    residual = torch.full((2, 64), 1e-3, device=device)
    y, total = getattr(ops, op)(x, residual)
    wanted = F.rms_norm(total, (64,), eps=torch.finfo(torch.float16).eps)
    torch.testing.assert_close(y, wanted.half())
    assert y.float().mean() < 0.1  # by float32's epsilon it would be near 1


@pytest.mark.parametrize("device", DEVICES)
def test_smoothing_of_large_scores_is_exact(device: str) -> None:
    logits = torch.full((2, 131), 1000.0, device=device)
    target = torch.tensor([0, 130], device=device)
    loss = ops.cross_entropy(logits, target, label_smoothing=0.1)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, label_smoothing=0.1), rtol=1e-4, atol=0)


INFINITE = [torch.inf, -torch.inf, torch.nan, 0.0, 30.0, -30.0, 1e4, -1e4]


def stand_alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """NaN and infinities stand in the same places."""
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(found), kind(wanted)), (found, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["gelu", "geglu"])
def test_gelu_and_its_gradient_have_torchs_nan(
    op: str, dtype: torch.dtype, approximate: str, device: str
) -> None:
    x = torch.tensor(INFINITE * 3, device=device).to(dtype).view(3, 8).requires_grad_()
    other = torch.full_like(x, 0.5).requires_grad_()
    if op == "gelu":
        y, given = ops.gelu(x, approximate=approximate), (x,)
    else:
        y, given = ops.geglu(x, other, approximate), (x, other)
    wide = F.gelu(
        x.float(), approximate=approximate
    )  # torch's of 16 bits on a CPU is another than its fp32's
    plain = wide if op == "gelu" else wide * other
    stand_alike(y, plain)
    for found, wanted in zip(
        torch.autograd.grad(y.sum(), given), torch.autograd.grad(plain.sum(), given), strict=True
    ):
        stand_alike(found, wanted)


@pytest.mark.parametrize(
    "device, rows, width",
    [
        ("cpu", 6, 24),
        pytest.param("cuda", 6, 24, marks=pytest.mark.gpu),
        pytest.param("cuda", 16384, 768, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
def test_an_mlp_and_its_gradients_have_torchs_nan(
    special: float, approximate: str, device: str, rows: int, width: int
) -> None:
    """One element of GELU's input is infinite or NaN: of the bias, where no product spreads it."""
    generator = torch.Generator(device).manual_seed(0)

    def of(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5
        return drawn.bfloat16().requires_grad_()

    x, weight_1, bias_1, weight_2 = of(rows, width), of(4 * width, width), of(4 * width), of(width, 4 * width)
    with torch.no_grad():
        bias_1[5] = special
        weight_2[:, 5] = weight_2[:, 5].abs() + 0.1
    given = x, weight_1, bias_1, weight_2
    y = ops.mlp(x, weight_1, bias_1, weight_2, None, approximate)
    inner = F.gelu(F.linear(x, weight_1, bias_1).float(), approximate=approximate)
    plain = F.linear(inner.bfloat16(), weight_2)
    stand_alike(y, plain)
    ours, torchs = (torch.autograd.grad(each, given, torch.ones_like(each)) for each in (y, plain))
    for found, wanted in zip(ours, torchs, strict=True):
        stand_alike(found, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_size", [3, 128])
@pytest.mark.parametrize("special", [torch.inf, torch.nan])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["reduction"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_words_that_do_not_count_have_no_gradient(
    dtype: torch.dtype, options: dict[str, str], special: float, chunk_size: int, device: str
) -> None:
    hidden = torch.randn(8, 24, device=device)
    hidden[2, 5] = special
    hidden = hidden.to(dtype).requires_grad_()
    weight = torch.randn(16, 24, device=device).to(dtype).requires_grad_()
    bias = torch.randn(16, device=device).to(dtype).requires_grad_()
    target = torch.randint(11, (8,), device=device)
    loss = ops.linear_cross_entropy(
        hidden, weight, target, bias, vocab_size=11, chunk_size=chunk_size, **options
    )
    for grad in torch.autograd.grad(loss.sum(), (weight, bias)):
        assert grad[:11].isnan().any()
        assert grad[11:].eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_swiglu_and_its_gradient_are_finite_where_torchs_are(dtype: torch.dtype, device: str) -> None:
    special = [torch.inf, -torch.inf, torch.nan, 90.0, -90.0, 1.0]
    gate = torch.tensor(special, device=device).repeat(24)
    x = torch.cat([gate, torch.randn(gate.shape, device=device)])[None].to(dtype).requires_grad_()
    y, theirs = ops.swiglu(x), F.silu(x[:, :144]) * x[:, 144:]
    assert torch.equal(y.isfinite(), theirs.isfinite())
    given = torch.randn(y.shape, device=device).to(dtype)
    (grad,), (wanted,) = (torch.autograd.grad(one, x, given) for one in (y, theirs))
    assert torch.equal(grad.isfinite(), wanted.isfinite())
