"""Torch's layer of self-attention over one packed product: masks, guards, who else reads its input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from fuseline.acceleration import kept_proofs
from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.observe import Sample
from fuseline.acceleration.packed_attention import LayerCall, _batch_first
from fuseline.acceleration.shared_input import across_modules
from fuseline.acceleration.trace import trace
from fuseline.acceleration.wide import run_wide

pytestmark = pytest.mark.usefixtures("proofs_shared")
Make = Callable[..., Acceleration]
B, T, WIDTH, HEADS = 3, 10, 32, 4


class Heads(nn.Module):
    """Residual, attention and norm, as in torch's layers."""

    def __init__(self, *, batch_first: bool = True, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=batch_first, bias=bias)
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.norm(x + self.attn(x, x, x, need_weights=False, **given)[0])


def masks(name: str) -> dict[str, Any]:
    hidden = torch.zeros(B, T, dtype=torch.bool)
    hidden[1, 6:] = hidden[2, :3] = True
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    near = (torch.arange(T)[:, None] - torch.arange(T)).abs() > 5
    heads = near.repeat(B * HEADS, 1, 1)
    heads[::2, :, 0] = False
    padding = torch.zeros(B, T).masked_fill(hidden, float("-inf"))
    known: dict[str, dict[str, Any]] = {
        "none": {},
        "padding": {"key_padding_mask": hidden},
        "added padding": {"key_padding_mask": padding},
        "mask": {"attn_mask": near},
        "added mask": {"attn_mask": torch.randn(T, T)},
        "mask of heads": {"attn_mask": heads},
        "causal": {"attn_mask": future, "is_causal": True},
        "causal and padding": {"attn_mask": near, "key_padding_mask": hidden, "is_causal": True},
    }
    return known[name]


def results(model: nn.Module, x: torch.Tensor, **given: Any) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    with across_modules():
        y = model(x, **given)
    incoming = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], incoming)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """But for roundings, of which sums of large numbers that cancel keep as many as their terms have."""
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=2e-6 * max(1.0, float(b.abs().max())))
        for a, b in zip(ours, theirs, strict=True)
    )


def op(fast: Acceleration) -> str:
    (site,) = [site for site in fast.kept if site.kind == "attention"]
    return site.op


def counts(fast: Acceleration) -> tuple[int, dict[str, int]]:
    (run,) = [run for run in fast.report().sites if run.kind == "attention"]
    return run.taken, dict(run.declined)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "mask",
    [
        "none",
        "padding",
        "added padding",
        "mask",
        "added mask",
        "mask of heads",
        "causal",
        "causal and padding",
    ],
)
def test_computes_what_torch_does(mask: str, batch_first: bool, x: torch.Tensor, keep_all: Make) -> None:
    model, given = Heads(batch_first=batch_first, bias=mask != "mask"), masks(mask)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    plain = copy.deepcopy(model)
    fast = keep_all(model, {"x": x, **given})
    assert op(fast) == "attention_packed"
    assert same(results(model, x, **given), results(plain, x, **given))
    assert counts(fast) == (1, {})
    fast.undo()
    assert all(map(torch.equal, results(model, x, **given), results(plain, x, **given)))


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_result_lies_in_memory_as_torchs_does(batch_first: bool, x: torch.Tensor, keep_all: Make) -> None:
    model = Heads(batch_first=batch_first)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    ours, theirs = (m.attn(x, x, x, need_weights=False)[0] for m in (model, plain))
    assert counts(fast) == (1, {})
    assert ours.is_contiguous() or not theirs.is_contiguous()


def test_other_calls_are_torchs(x: torch.Tensor, keep_all: Make) -> None:
    model = Heads()
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    other = x.flip(1)
    assert torch.equal(model.attn(x, x, x)[1], plain.attn(x, x, x)[1])
    assert torch.equal(
        model.attn(x, other, other, need_weights=False)[0], plain.attn(x, other, other, need_weights=False)[0]
    )
    bias = torch.randn(T, T, requires_grad=True)
    (ours,) = torch.autograd.grad(model.attn(x, x, x, attn_mask=bias, need_weights=False)[0].sum(), bias)
    (theirs,) = torch.autograd.grad(plain.attn(x, x, x, attn_mask=bias, need_weights=False)[0].sum(), bias)
    assert torch.equal(ours, theirs)
    given = masks("padding")  # of a form that was not proved
    model.attn(x, x, x, need_weights=False, **given)
    taken, declined = counts(fast)
    assert (taken, sum(declined.values())) == (0, 4)


def test_weights_that_are_made_on_the_way(x: torch.Tensor, keep_all: Make) -> None:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    model = Heads()
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    for module in (model, plain):
        parametrize.register_parametrization(module.attn, "in_proj_weight", Double())
    assert same(results(model, x), results(plain, x))
    assert counts(fast)[0] == 1


def test_dropout_is_of_the_weights_and_only_in_training(x: torch.Tensor, keep_all: Make) -> None:
    model = Heads(dropout=0.5)
    fast = keep_all(model, x)
    assert op(fast) == "attention_packed"
    assert not torch.equal(model(x), model(x))
    attn = model.attn
    drawn = torch.stack([attn(x, x, x, need_weights=False)[0] for _ in range(2000)])
    without = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    without.load_state_dict(attn.state_dict())
    whole = without(x, x, x)[0]
    deviation = drawn.std(0) / 2000**0.5
    assert ((drawn.mean(0) - whole).abs() < 6 * deviation).all()


def test_what_computes_something_else_is_refused(
    x: torch.Tensor, keep_all: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kept_proofs, "folder", lambda: tmp_path / "of this test")
    right = LayerCall.run
    monkeypatch.setattr(LayerCall, "run", lambda call, seed=None: right(call, seed) * 1.001)
    assert op(keep_all(Heads(), x)) == "attention"  # torch's function in the layer is still replaced


def test_other_codes_layer_keeps_its_result_in_one_piece(x: torch.Tensor, keep_all: Make) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(WIDTH, HEADS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, attn = x.transpose(0, 1), self.attn
            weights = attn.in_proj_weight, attn.in_proj_bias, None, None, False, 0.0, attn.out_proj.weight
            y = F.multi_head_attention_forward(
                x, x, x, WIDTH, HEADS, *weights, attn.out_proj.bias, need_weights=False
            )[0]
            return y.view(-1)

    model = nn.Sequential(Own())
    expected = model(x)
    assert op(keep_all(model, x)) == "attention"
    assert torch.allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_reads_the_tensor_that_others_read() -> None:
    x = torch.randn(B, T, WIDTH, requires_grad=True) * 1
    assert _batch_first(x.transpose(0, 1)) is x
    for other in (x.detach(), x[:, 1:], x.transpose(0, 2).contiguous().transpose(0, 2)):
        assert _batch_first(other.transpose(0, 1)) is not x
    view = x.detach().transpose(0, 1)
    assert _batch_first(view.requires_grad_()).grad_fn is not x.grad_fn


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_on_a_gpu(padded: bool, keep_all: Make) -> None:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("cuda", torch.bfloat16)
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(8, 128, 128, device="cuda").bfloat16()
    given: dict[str, Any] = {}
    if padded:
        given["src_key_padding_mask"] = (
            torch.arange(128, device="cuda") > torch.arange(93, 101, device="cuda")[:, None]
        )
    fast = keep_all(model, {"src": x, **given})
    assert {site.op for site in fast.kept if site.kind == "attention"} == {"attention_packed"}

    def run(module: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        src = x.detach().clone().to(dtype).requires_grad_()
        with across_modules():
            y = module(src, **given)
        weights = torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).to(dtype)
        grads = torch.autograd.grad((y * weights).sum(), [src, *module.parameters()])
        return [y.detach().double(), *(grad.double() for grad in grads)]

    exact = run(wide, torch.float64)
    for ours, near, far in zip(run(model, torch.bfloat16), run(plain, torch.bfloat16), exact, strict=True):
        assert (ours - far).norm() <= 2 * (near - far).norm() + 2**-7 * far.norm()


def test_float64_may_lie_in_memory_otherwise() -> None:
    """As results of attention do, which other kernels compute in float64."""

    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(0, 1).contiguous().view(-1, WIDTH)

    x = torch.randn(B, T, WIDTH)
    traced = trace(Rows(), Sample((x.transpose(0, 1).contiguous().transpose(0, 1),), {}))
    assert torch.equal(run_wide(traced, [x])[0], x.double().transpose(0, 1).reshape(-1, WIDTH))
