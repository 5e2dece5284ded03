"""What single modules are recognized as, however they are written, and what is said of those left."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuseline.acceleration.prove import Draw, Results, UnprovenError, compare, compare_draws

Make = Callable[..., Any]
WIDTH = 24


class Llama(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + 0.1 * torch.randn(WIDTH)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Gemma(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class BySum(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + self.eps) * self.weight


class Written(nn.Module):
    """LayerNorm by hand, its bias first among the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.gain = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return self.shift + (x - mean) * (variance + 1e-3) ** -0.5 * self.gain


class Annotated(Written):
    """As in The Annotated Transformer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.shift


class EpsOutside(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3)


class Lengths(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1) * self.weight


class ByPlace(nn.Module):
    """A weight for each of five places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,)) * self.weight


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Gated(nn.Module):
    """down(f(gate(x)) * up(x)), in either order."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], exchanged: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 40, bias=False), nn.Linear(WIDTH, 40)
        self.down, self.function, self.exchanged = nn.Linear(40, WIDTH), function, exchanged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.first(x), self.second(x)
        return self.down(one * self.function(other) if self.exchanged else self.function(one) * other)


class Packed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate_up, self.down, self.how = nn.Linear(WIDTH, 80), nn.Linear(40, WIDTH), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.gate_up(x)
        if self.how == "chunk":
            gate, up = z.chunk(2, dim=-1)
        elif self.how == "slice, up first":
            up, gate = z[..., :40], z[..., 40:]
        else:
            gate, up = z.split(40, dim=2)
        return self.down(up * F.silu(gate))


class Plain(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], p: float = 0.0) -> None:
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=False)
        self.function, self.drop = function, nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.fc_out(self.drop(self.function(self.fc_in(x)))))


class PostNorm(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.dense, self.norm, self.drop = nn.Linear(40, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(p)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.norm(self.drop(self.dense(x)) + residual)


class Whole(nn.Module):
    """A model of one part, between two linear layers so that gradients pass through it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before, self.part, self.wide = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        y = self.part(self.wide(hidden), hidden) if isinstance(self.part, PostNorm) else self.part(hidden)
        return (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype)).square().mean() + self.wide(
            hidden
        ).mean()


def new_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def by_erf(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


FOUND = {
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), "layer_norm"),
    "LayerNorm of two dimensions": (lambda: nn.LayerNorm((5, WIDTH)), "layer_norm"),
    "LayerNorm without affine": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "layer_norm"),
    "LayerNorm by hand": (Written, "layer_norm"),
    "a weight by place": (ByPlace, "layer_norm"),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH, eps=1e-5), "rms_norm"),
    "RMSNorm, eps of the dtype": (lambda: nn.RMSNorm(WIDTH), "rms_norm"),
    "Llama": (Llama, "rms_norm"),
    "an odd epsilon": (lambda: Llama(0.0123), "rms_norm"),
    "Gemma": (Gemma, "rms_norm"),
    "by a sum": (BySum, "rms_norm"),
    "GELU": (nn.GELU, "activation"),
    "NewGELU": (lambda: Function(new_gelu), "activation"),
    "FastGELU": (lambda: Function(fast_gelu), "activation"),
    "GELU by erf": (lambda: Function(by_erf), "activation"),
    "SwiGLU": (lambda: Gated(F.silu), "gated_mlp"),
    "SwiGLU, the gate second": (lambda: Gated(F.silu, exchanged=True), "gated_mlp"),
    "GeGLU": (lambda: Gated(by_erf), "gated_mlp"),
    "packed": (lambda: Packed("chunk"), "gated_mlp"),
    "packed, up first": (lambda: Packed("slice, up first"), "gated_mlp"),
    "packed, by split": (lambda: Packed("split"), "gated_mlp"),
    "MLP": (lambda: Plain(new_gelu), "mlp"),
    "MLP with dropout": (lambda: Plain(F.gelu, 0.3), "mlp"),
    "linear and GELU": (lambda: nn.Sequential(nn.Linear(WIDTH, 30), nn.GELU()), "activation"),
    "residual and norm": (lambda: PostNorm(0.0), "residual_norm"),
    "residual, dropout and norm": (lambda: PostNorm(0.3), "residual_norm"),
}


def loss_and_gradients(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(5)
    loss = model(x)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("name", FOUND)
def test_is_found_and_right(name: str, keep_all: Make) -> None:
    make, kind = FOUND[name]
    model, x = Whole(make()), torch.randn(3, 5, WIDTH)
    before, gradients = loss_and_gradients(model, x)
    fast = keep_all(model, x)
    (site,) = [site for site in fast.sites if site.path == "part"]
    assert (site.kind, site.status, site.reason) == (kind, "kept", "")
    assert site.error is not None
    assert site.error < 1e-6
    model.eval()
    torch.manual_seed(5)
    fast_eval = model(x)
    after, fast_gradients = loss_and_gradients(model.train(), x)
    assert fast.report().sites[0].declined == {}
    assert fast.report().taken == 2
    fast.undo()
    assert torch.allclose(model.eval()(x), fast_eval, rtol=1e-5)
    again, same = loss_and_gradients(model.train(), x)
    assert torch.equal(again, before)
    assert all(torch.equal(one, other) for one, other in zip(gradients, same, strict=True))
    if "dropout" not in name:
        assert torch.allclose(after, before, rtol=1e-5)
        for ours, theirs in zip(fast_gradients, gradients, strict=True):
            assert torch.linalg.vector_norm(ours - theirs) <= 1e-5 * torch.linalg.vector_norm(theirs) + 1e-7


class Dwelling(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.LayerNorm(WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.gelu(x) * 1.0


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) if x.sum() > 0 else x


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            return torch.autograd.grad(F.gelu(inner), inner, grads[0])


REFUSED = {
    "Annotated Transformer": (Annotated, "layer_norm", "outside of the root"),
    "epsilon outside": (EpsOutside, "rms_norm", "outside of the root"),
    "lengths": (Lengths, "rms_norm", "length of a row"),
    "quick GELU": (lambda: Function(lambda x: x * torch.sigmoid(1.702 * x)), "activation", "quick_gelu"),
    "GELU with a slip": (
        lambda: Function(lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.0447 * x**3)))),
        "activation",
        "none that Fuseline has an op for",
    ),
    "MLP with ReLU": (lambda: Plain(F.relu), "mlp", "relu"),
    "gate with ReLU": (lambda: Gated(F.relu), "gated_mlp", "relu"),
    "own gradient": (lambda: Function(Reversed.apply), "activation", "gradient of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_the_reason(name: str, keep_all: Make) -> None:
    make, kind, reason = REFUSED[name]
    model, x = Whole(make()), torch.randn(3, 5, WIDTH)
    before = model(x)
    fast = keep_all(model, x)
    (site,) = [site for site in fast.sites if site.path == "part"]
    assert (site.kind, site.status) == (kind, "refused")
    assert reason in site.reason
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("make", [Dwelling, Branching, lambda: nn.ReLU(inplace=True), nn.BatchNorm1d])
def test_is_left_alone(make: Callable[..., nn.Module], keep_all: Make) -> None:
    part = nn.BatchNorm1d(5) if make is nn.BatchNorm1d else make()
    model, x = Whole(part), torch.randn(3, 5, WIDTH)
    calls = getattr(part, "calls", None)
    fast = keep_all(model, x)
    assert "part" not in {site.path for site in fast.sites}
    assert getattr(part, "calls", None) in (None, calls + 1 if calls is not None else None)
    assert "forward" not in vars(part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("make", [Llama, Gemma, lambda: nn.LayerNorm(WIDTH), lambda: Gated(F.silu)])
def test_other_dtypes(make: Callable[[], nn.Module], dtype: torch.dtype, keep_all: Make) -> None:
    model = Whole(make()).to(dtype)
    x = torch.randn(3, 5, WIDTH).to(dtype)
    before = model(x)
    fast = keep_all(model, x)
    (site,) = [site for site in fast.sites if site.path == "part"]
    assert site.status == "kept", site.reason
    assert model(x).dtype is dtype
    # Llama's and Gemma's own code computes in float32, on float64 too.
    assert torch.allclose(model(x), before, rtol=float(max(8 * torch.finfo(dtype).eps, 1e-6)))


def test_float32_weights_and_narrow_inputs_keep_the_dtype_that_comes_out(keep_all: Make) -> None:
    model, x = nn.Sequential(Llama()), torch.randn(3, 5, WIDTH).bfloat16()
    before = model(x)
    assert before.dtype is torch.float32
    fast = keep_all(model, x)
    assert [site.status for site in fast.sites] == ["kept"]
    assert model(x).dtype is torch.float32
    assert torch.allclose(model(x), before, rtol=1e-2, atol=1e-2)


def test_autocast_is_what_it_was_proved_under(keep_all: Make) -> None:
    model, x = Whole(nn.LayerNorm(WIDTH)), torch.randn(3, 5, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        fast = keep_all(model, x)
        after = model(x)
    assert [site.status for site in fast.kept] == ["kept"]
    assert after.dtype is before.dtype
    assert torch.allclose(after.float(), before.float(), rtol=2e-2)
    assert fast.report().declined == 0
    model(x)
    assert "proved" in next(iter(fast.report().sites[0].declined))


class Returns(nn.Module):
    """A norm that hands on its input beside the result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, *, flag: bool = False) -> dict[str, Any]:
        return {"y": self.norm(x), "x": x, "flag": flag}


def results_of(*outputs: float) -> Results:
    return Results([torch.tensor([one]) for one in outputs], [])


def test_an_error_is_held_against_the_worst_of_the_originals_where_one_was_small_by_chance() -> None:
    ulp = torch.finfo(torch.float32).eps

    def draw(number: int) -> Draw:
        return results_of(1 + 2 * ulp), results_of(1 + (ulp if number else 0.0)), results_of(1.0)

    with pytest.raises(UnprovenError):
        compare([draw(0)], torch.float32)
    assert compare_draws(draw, torch.float32) == pytest.approx((2 * ulp, ulp))
    with pytest.raises(UnprovenError):
        compare_draws(lambda number: (results_of(1 + 9 * ulp), *draw(number)[1:]), torch.float32)


class WrittenOut(nn.Module):
    """Attention in four dimensions, or in three with dropout between."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.norm, self.spare, self.dims = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.norm(x).unflatten(-1, (2, -1)).transpose(1, 2)
        if self.dims == 4:
            return ((heads @ heads.mT).softmax(-1) @ heads).transpose(1, 2).flatten(-2)
        flat = heads.flatten(0, 1)
        weights = F.dropout(torch.bmm(flat, flat.mT).softmax(-1), 0.1, self.training)
        return torch.bmm(weights, flat).unflatten(0, (-1, 2)).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("dims", [3, 4])
def test_what_is_left_says_why(dims: int, keep_all: Make) -> None:
    fast = keep_all(Whole(WrittenOut(dims)), torch.randn(3, 5, WIDTH))
    said = {(site.path, site.kind): (site.status, site.reason) for site in fast.sites}
    assert said["part.norm", "layer_norm"] == ("kept", "")
    assert said["part.spare", "layer_norm"] == ("refused", "the batch does not call it")
    status, reason = said["part", "attention"]
    assert status == "refused"
    assert "written out" in reason


def test_a_table_whose_rows_are_scaled_down_stays_as_it_is(keep_all: Make) -> None:
    table = nn.Embedding(10, WIDTH, max_norm=0.1)
    before = table.weight.detach().clone()
    fast = keep_all(nn.Sequential(table, nn.LayerNorm(WIDTH)), torch.arange(6))
    assert torch.equal(table.weight, before)
    assert "embedding_renorm_" in {site.kind: site.reason for site in fast.sites}["embedding"]


def test_returns_what_the_original_returned(keep_all: Make) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Returns()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.part(x, flag=True)
            assert out["flag"] is True
            assert out["x"] is x
            return out["y"] + out["x"]

    model, x = Model(), torch.randn(2, 5, WIDTH)
    before = model(x)
    fast = keep_all(model, x)
    statuses = {site.path: site.status for site in fast.sites}
    assert statuses == {"part": "kept", "part.norm": "found"}, str(fast)
    assert torch.allclose(model(x), before, atol=1e-6)
    assert fast.report().taken == 1
