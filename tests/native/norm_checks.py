"""What tests of the norms' kernels have in common: results and gradients against float64, with
what may be asked for."""

from __future__ import annotations

import torch

from fuseline.ops.philox import multipliers

from .guarded import DEVICE

P = 0.25
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def place(
    rows: int, n: int, dtype: torch.dtype, offset: int, *, scale: float = 1.0, shift: float = 0.0
) -> torch.Tensor:
    """Random rows that begin so many elements behind a multiple of 16 bytes."""
    room = torch.randn(rows * n + offset, device=DEVICE).mul_(scale).add_(shift).to(dtype)
    return room[offset:].view(rows, n)


def near(found: torch.Tensor, exact: torch.Tensor, limit: float, what: str) -> None:
    error = float((found.double() - exact).norm() / exact.norm())
    assert error < limit, f"{what}: error {error:.1e}"


def statistics(wide: torch.Tensor, centred: bool) -> tuple[torch.Tensor, torch.Tensor]:
    middle = wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[:, :1])
    return middle, ((wide - middle).square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def check_gradients(
    kind: str, rows: int, n: int, dtype: torch.dtype, *, wide: torch.dtype | None = None, offset: int = 0,
    affine: torch.dtype | None = None, sums: bool = True, each: bool = True, p: float = P,
    weighted: bool = True, shift: float = 0.1, normalized: bool = False,
) -> None:  # fmt: skip
    """`wide`: the dtype of what was normalized; `affine`: of the weights; `sums`: over rows are wanted;
    `each`: of each row; `weighted`: there are a weight and a bias; `shift`: the mean of y's gradient;
    `normalized`: what was normalized comes as 16 bits of (x - mean) * rstd."""
    what = f"{kind}, {rows} x {n} of {dtype}, {offset} elements off"
    centred, added, drops = "layer" in kind, "add" in kind, "dropout" in kind
    x, grad_y = place(rows, n, wide or dtype, offset, shift=0.5), place(rows, n, dtype, offset, shift=shift)
    grad_sum = place(rows, n, wide or dtype, offset) if added else None
    ones = place(1, n, affine or dtype, 0, scale=0.25, shift=1.0)[0]
    weight = ones if weighted else None
    bias, x_bias = (torch.zeros_like(ones) if given else None for given in (centred and weighted, drops))
    middle, scale = statistics(x.double(), centred)
    mean, rstd = middle[:, 0].float() if centred else None, scale[:, 0].float()
    word = torch.full((1,), 12345, device=DEVICE) if drops and p > 0 else None
    apart = drops or (added and wide is not None)
    affine_wanted = sums and weighted
    wanted = [each, each and apart, affine_wanted, affine_wanted and centred, sums and drops]
    x_hat = (x.double() - middle) * scale
    if normalized:
        x = place(rows, n, dtype, offset).copy_(x_hat)
        x_hat = x.double()
    given = x, (n,), mean, rstd, weight, bias, x_bias, p if drops else 0.0, word, wanted, normalized
    found, again = (torch.ops.fuseline.norm_backward(kind, grad_y, grad_sum, *given) for _ in range(2))

    grad = grad_y.double()
    scaled = grad if weight is None else grad * weight.double()
    grad_x = scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True)
    grad_x = scale * (grad_x - scaled.mean(-1, keepdim=True) if centred else grad_x)
    grad_x = grad_x if grad_sum is None else grad_x + grad_sum.double()
    dropped = grad_x * multipliers(word, (rows, n), p) if word is not None else grad_x
    exact = {
        "x": grad_x,
        "dropped": dropped,
        "weight": (grad * x_hat).sum(0),
        "bias": grad.sum(0),
        "x_bias": dropped.sum(0),
    }
    for name, one, other, is_wanted in zip(exact, found, again, wanted, strict=True):
        if is_wanted:
            kept = dtype if name == "x_bias" else one.dtype  # it may be the sum of what was written
            limit = (16 if kept == torch.float32 else 2) * torch.finfo(kept).eps
            near(one, exact[name], limit, f"{what}: gradient of {name}")
            assert torch.equal(one, other), f"{what}: gradient of {name}"


def check_forward(
    kind: str, rows: int, n: int, dtype: torch.dtype, offset: int, *, weighted: bool = True,
    affine_offset: int = 0,
) -> None:  # fmt: skip
    centred, added, drops = "layer" in kind, "add" in kind, "dropout" in kind
    what = f"{kind}, {rows} x {n} of {dtype}, {offset} elements off"
    x = place(rows, n, dtype, offset, shift=0.5)
    residual = place(rows, n, dtype, offset) if added else None
    weight = place(1, n, dtype, affine_offset, scale=0.25, shift=1.0)[0] if weighted else None
    bias = place(1, n, dtype, affine_offset)[0] if centred and weighted else None
    x_bias = place(1, n, dtype, affine_offset)[0] if drops else None
    word = torch.full((1,), 12345, device=DEVICE) if drops else None
    given = (n,), weight, bias, 1e-5, x_bias, P if drops else 0.0, word, centred
    first, again = (torch.ops.fuseline.norm_forward(kind, x, residual, *given) for _ in range(2))
    y, total, mean, rstd = first
    eps = torch.finfo(dtype).eps
    if residual is not None:
        branch = x.double() if x_bias is None else x.double() + x_bias.double()
        branch = branch if word is None else branch * multipliers(word, (rows, n), P)
        exact = residual.double() + branch
        near(total, exact, 2 * eps, what)
        assert (total.double() - exact).abs().max() < 2 * eps * exact.abs().max(), what
    summed = x.double() if residual is None else total.double()
    middle, scale = statistics(summed, centred)
    exact = (summed - middle) * scale
    if weight is not None:
        exact = exact * weight.double() + (0.0 if bias is None else bias.double())
    near(y, exact, (16 if dtype == torch.float32 else 2) * eps, what)
    worst = (y.double() - exact).abs().max() / exact.abs().max()  # a row's ends are a few of its elements
    assert worst < (64 if dtype == torch.float32 else 2) * eps, f"{what}: {worst:.1e}"
    near(rstd, scale[:, 0], 1e-5, what)
    if centred:
        near(mean, middle[:, 0], 1e-5, what)
    for one, other in zip(first, again, strict=True):
        assert one is None or torch.equal(one, other), what
