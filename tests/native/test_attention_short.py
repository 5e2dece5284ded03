"""The kernels of short attention against float64: sizes, layouts, masks, dropout, poison, repetition.

An error may be twice that of the same computation in PyTorch at the same dtype, plus one unit in the last
place. Every output is poisoned first and stands between guards.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch

from fuseline.ops.philox import multipliers

from .attention_records import (
    CAUSAL,
    Attention,
    GradientsRecord,
    Options,
    gradients_record,
    open_attention,
    record,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
UNSUPPORTED = -1
GUARD = 64
LAYOUTS = ("bhtd", "bthd", "packed")


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: torch.dtype
    kv_heads: int | None = None
    layout: str = "bhtd"

    def keys(self) -> Shape:
        return replace(self, heads=self.kv_heads or self.heads, seqlen_q=self.seqlen_k)


@pytest.fixture(scope="module")
def kernels() -> Attention:
    return open_attention()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def is_hopper() -> bool:
    """Whose general kernels take fp16."""
    return torch.cuda.get_device_capability() == (9, 0)


def place(shape: Shape, fill: bool) -> torch.Tensor:
    """A [B, H, T, D] view of its layout inside a poisoned buffer; random, or poison (NaN) for an output."""
    sizes = shape.batch, shape.heads, shape.seqlen_q, shape.head_dim
    parts = 3 if shape.layout == "packed" else 1
    count = math.prod(sizes) * parts
    buffer = torch.full((count + 2 * GUARD,), float("nan"), dtype=shape.dtype, device=DEVICE)
    inner = buffer[GUARD : GUARD + count]
    if shape.layout == "bhtd":
        view = inner.view(sizes)
    else:
        view = inner.view(sizes[0], sizes[2], parts, sizes[1], sizes[3])[:, :, parts - 1].transpose(1, 2)
    if fill:
        view.copy_(torch.randn(sizes, device=DEVICE))
    return view


def only_wrote(view: torch.Tensor) -> bool:
    """Whether the view holds no poison, and what is around it nothing else."""
    buffer = view._base
    assert buffer is not None
    outside = buffer.clone()
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(float("nan"))
    return bool(outside.isnan().all()) and not bool(view.isnan().any())


def visible(shape: Shape, options: Options) -> torch.Tensor:
    rows = torch.arange(shape.seqlen_q, device=DEVICE)[:, None]
    keys = torch.arange(shape.seqlen_k, device=DEVICE)
    shift = shape.seqlen_k - shape.seqlen_q if options.causal == "bottom_right" else 0
    right = options.window_right if options.causal == "none" else 0
    seen = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool, device=DEVICE)
    if options.window_left >= 0:
        seen &= keys >= rows + shift - options.window_left
    if right >= 0:
        seen &= keys <= rows + shift + right
    return seen


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in the dtype of q: the result and the logarithm of the softmax's sums."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * options.softmax_scale
    if options.mask is not None and options.mask.dtype != torch.bool:
        scores = scores + options.mask.to(q.dtype)
    seen = visible(shape, options)
    if options.mask is not None and options.mask.dtype == torch.bool:
        seen = seen & options.mask
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    hidden = scores.amax(-1, keepdim=True) == -math.inf
    p = scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    if options.seed is not None and options.dropout_p > 0:
        p = p * multipliers(options.seed, p.shape, options.dropout_p).to(p.dtype)
    return p @ v, lse


def assert_as_good(out: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    ulp = torch.finfo(out.dtype).eps
    for name, size in (("error", torch.Tensor.norm), ("worst", lambda x: x.abs().max())):
        error, bound = size(out.double() - exact), size(eager.double() - exact)
        assert error <= 2 * bound + ulp * size(exact), (
            f"{what}: {name} {error:.2e} of {size(exact):.2e}, eager {bound:.2e}"
        )


def scratch(kernels: Attention, gradients: GradientsRecord, backward: bool) -> torch.Tensor | None:
    """The workspace of a call or its gradients, poisoned; None where it wants none."""
    size = kernels.workspace(gradients, backward)
    return torch.full((size,), 255, dtype=torch.uint8, device=DEVICE) if size > 0 else None


def check(kernels: Attention, shape: Shape, options: Options) -> None:
    """Forward and backward: right, inside of their outputs, and repeatable.

    The second runs have a workspace: a counter of problems if there are many, which blocks take in any order.
    """
    what = f"{shape} {options}"
    q, k, v = place(shape, True), place(shape.keys(), True), place(shape.keys(), True)
    out = place(replace(shape, layout="bthd"), False)
    lse = torch.full(q.shape[:3], float("nan"), device=DEVICE)
    call = record(q, k, v, options, out, lse)
    assert kernels.is_short(call, False), what
    assert kernels.forward(call) == 0, what
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    narrow = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    exact, exact_lse = attention(*wide, shape, options)
    eager, _ = attention(*narrow, shape, options)
    assert only_wrote(out), what
    assert_as_good(out, eager, exact, f"out of {what}")
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4, msg=f"lse of {what}")
    again = place(replace(shape, layout="bthd"), False)
    workspace = scratch(kernels, gradients_record(call, q, None, None, None), False)
    assert kernels.forward(record(q, k, v, options, again, workspace=workspace)) == 0
    assert torch.equal(out, again), f"out of {what} differs from run to run"
    grad_out = place(shape, True)
    grad_lse = torch.randn_like(lse) if shape.seqlen_q % 2 and bool(lse.isfinite().all()) else None
    results = [(exact, eager), (exact_lse, attention(*narrow, shape, options)[1])]
    outputs = [[results[0][i], *([results[1][i]] if grad_lse is not None else [])] for i in range(2)]
    incoming = [grad_out, *([grad_lse] if grad_lse is not None else [])]
    exact_grads = torch.autograd.grad(outputs[0], wide, [g.double() for g in incoming])
    eager_grads = torch.autograd.grad(outputs[1], narrow, [g.to(shape.dtype) for g in incoming])
    runs = []
    grouped = shape.kv_heads not in (None, shape.heads)
    for given in (grouped, True):
        grads = [place(s, False) for s in (shape, shape.keys(), shape.keys())]
        gradients = gradients_record(call, grad_out, *grads, grad_lse)
        workspace = scratch(kernels, gradients, True) if given else None
        gradients.workspace = None if workspace is None else workspace.data_ptr()
        assert kernels.backward(gradients) == 0, what
        runs.append(grads)
    for name, one, two, narrow_grad, wide_grad in zip("qkv", *runs, eager_grads, exact_grads, strict=True):
        assert only_wrote(one), f"grad_{name} of {what}"
        assert_as_good(one, narrow_grad, wide_grad, f"grad_{name} of {what}")
        assert torch.equal(one, two), f"grad_{name} of {what} differs from run to run"


def draw(rng: random.Random) -> tuple[Shape, Options]:
    dtype = rng.choice((torch.bfloat16,) if is_hopper() else (torch.float16, torch.bfloat16))
    length = rng.choice((16, 32, 64, 128))
    seqlen_q = rng.choice((length, rng.randint(1, length)))
    seqlen_k = rng.choice((seqlen_q, length, rng.randint(1, length)))
    head_dim = rng.choice((8, 16, 24, 32, 40, 64, 64, 72, 96, 120, 128))
    heads = rng.choice((1, 2, 3, 4))
    kv_heads = rng.choice((None, None, None, 1))
    shape = Shape(
        rng.randint(1, 3), heads, seqlen_q, seqlen_k, head_dim, dtype, kv_heads, rng.choice(LAYOUTS)
    )
    sizes = (shape.batch, heads, seqlen_q, seqlen_k)
    options = Options(
        causal=rng.choice(("none", *CAUSAL)),
        window_left=rng.choice((-1, -1, 0, 5, 40)),
        window_right=rng.choice((-1, -1, -1, 0, 7)),
        softmax_scale=rng.choice((1.0, 0.3)) / math.sqrt(head_dim),
        mask=draw_mask(rng, sizes, dtype),
    )
    if rng.random() < 0.3:
        seed = torch.randint(-(2**62), 2**62, (1,), device=DEVICE)
        options = replace(options, dropout_p=rng.choice((0.1, 0.5)), seed=seed)
    return shape, options


def draw_mask(
    rng: random.Random, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> torch.Tensor | None:
    kind = rng.choice(("none", "none", "padding", "bool", "additive", "fp32"))
    if kind == "none":
        return None
    batch, _, _, seqlen_k = sizes
    if kind == "padding":
        lengths = torch.randint(0, seqlen_k + 1, (batch, 1, 1, 1), device=DEVICE)
        return torch.arange(seqlen_k, device=DEVICE) < lengths
    sizes = tuple(size if rng.random() < 0.6 else 1 for size in sizes)
    if kind == "bool":
        return torch.rand(sizes, device=DEVICE) < 0.7
    mask = torch.randn(sizes, device=DEVICE).to(dtype if kind == "additive" else torch.float32)
    return mask.masked_fill(torch.rand(sizes, device=DEVICE) < 0.2, -math.inf)


@pytest.mark.parametrize("number", range(12))
def test_random_cases(kernels: Attention, number: int) -> None:
    rng = random.Random(number)
    for _ in range(16):
        check(kernels, *draw(rng))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(("seqlen", "batch"), [(16, 800), (32, 360), (64, 180), (128, 90)])
def test_blocks_that_take_many_problems(kernels: Attention, seqlen: int, batch: int, head_dim: int) -> None:
    for layout, kv_heads in (("bhtd", 3), ("bthd", 12), ("packed", 12)):
        shape = Shape(batch, 12, seqlen, seqlen, head_dim, torch.bfloat16, kv_heads, layout)
        check(kernels, shape, Options(softmax_scale=head_dim**-0.5, causal=CAUSAL[len(layout) % 3]))


@pytest.mark.parametrize("seqlen", [16, 64, 128])
def test_a_row_of_nothing_but_the_lowest_number(kernels: Attention, seqlen: int) -> None:
    shape = Shape(2, 2, seqlen, seqlen - 3, 64, torch.bfloat16)
    mask = torch.full((1, 1, 1, seqlen - 3), torch.finfo(torch.float32).min, device=DEVICE)
    q, k, v = place(shape, True), place(shape.keys(), True), place(shape.keys(), True)
    out = place(shape, False)
    assert kernels.forward(record(q, k, v, Options(softmax_scale=0.125, mask=mask), out)) == 0
    mean = v.float().mean(-2, keepdim=True).expand(out.shape)
    torch.testing.assert_close(out.float(), mean, rtol=1e-2, atol=1e-2)


def test_a_counter_of_problems_is_for_many(kernels: Attention) -> None:
    for batch, wanted in ((1, 0), (2**16, 16)):
        q = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device=DEVICE).expand(batch, 1, 128, 64)
        gradients = gradients_record(record(q, q, q, Options()), q, None, None, None)
        assert kernels.workspace(gradients, False) == wanted


def test_gradients_that_nobody_wants(kernels: Attention) -> None:
    shape = Shape(3, 5, 60, 60, 64, torch.bfloat16)
    q, k, v, grad_out = (place(shape, True) for _ in range(4))
    call = record(q, k, v, Options(softmax_scale=0.125))
    every = [place(shape, False) for _ in range(3)]
    assert kernels.backward(gradients_record(call, grad_out, *every)) == 0
    for wanted in range(3):
        grads = [place(shape, False) if i == wanted else None for i in range(3)]
        assert kernels.backward(gradients_record(call, grad_out, *grads)) == 0
        assert torch.equal(grads[wanted], every[wanted])


def test_an_expanded_gradient(kernels: Attention) -> None:
    shape = Shape(3, 5, 30, 20, 32, torch.bfloat16)
    q, k, v = place(shape, True), place(shape.keys(), True), place(shape.keys(), True)
    grad_out = torch.randn(32, dtype=torch.bfloat16, device=DEVICE)
    call = record(q, k, v, Options(softmax_scale=0.2))
    runs = []
    for grad in (grad_out.expand(q.shape), grad_out.expand(q.shape).contiguous()):
        grads = [place(s, False) for s in (shape, shape.keys(), shape.keys())]
        assert kernels.backward(gradients_record(call, grad, *grads)) == 0
        runs.append(grads)
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


def test_refuses_what_it_does_not_do(kernels: Attention) -> None:
    shape = Shape(1, 1, 16, 16, 64, torch.bfloat16)
    q, k, v = (place(shape, True) for _ in range(3))
    options = Options(softmax_scale=0.125)
    out = place(shape, False)
    assert kernels.is_short(record(q, k, v, options, out), True)
    long = Shape(1, 1, 129, 16, 64, torch.bfloat16)
    assert not kernels.is_short(record(place(long, True), k, v, options, place(long, False)), False)
    assert not kernels.is_short(record(q.float(), k.float(), v.float(), options, out), False)
    assert kernels.is_short(record(q.half(), k.half(), v.half(), options, out), True) != is_hopper()
    assert not kernels.is_short(record(q, k, v, replace(options, softmax_scale=-1.0), out), False)
    odd = torch.randn(1, 1, 16, 65, device=DEVICE).to(torch.bfloat16)[..., 1:]
    assert kernels.forward(record(odd, k, v, options, out)) == UNSUPPORTED
