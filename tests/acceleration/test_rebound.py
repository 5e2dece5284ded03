"""Functions of a model's file that are stood in for: rotary embeddings and torch's attention."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuseline.acceleration import rebound, rotary
from fuseline.acceleration.handle import Acceleration

pytestmark = pytest.mark.usefixtures("proofs_shared")
Make = Callable[..., Acceleration]
WIDTH, HEADS = 32, 4


HALVES = 2  # read by a function that is called by the one that is stood in for


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(HALVES, -1)[:2]
    return torch.cat((-other, one, *x.chunk(HALVES, -1)[2:]), -1)


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def turn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def turn_pairs(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_pairs(q) * sin, k * cos + rotate_pairs(k) * sin


def turn_backwards(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos - rotate_half(q) * sin, k * cos - rotate_half(k) * sin


class Tables(nn.Module):
    turns: torch.Tensor

    def __init__(self, pairs: bool = False) -> None:
        super().__init__()
        self.register_buffer("turns", 100.0 ** -(torch.arange(4) / 4))
        self.pairs = pairs

    @torch.no_grad()
    def forward(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = places[..., None].float() * self.turns
        both = angles.repeat_interleave(2, -1) if self.pairs else torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        q, k = turn(q, k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class InPairs(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        q, k = turn_pairs(q, k, cos, sin)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Backwards(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        q, k = turn_backwards(q, k, cos, sin)
        return self.out((q @ k.transpose(-1, -2) @ v).transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self, attention: type[Attention] = Attention, pairs: bool = False) -> None:
        super().__init__()
        self.tables, self.attn = Tables(pairs), attention()
        self.scale = 1.0

    def forward(self, x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(x.shape[1])[None] if places is None else places
        cos, sin = self.tables(x, places)
        if self.scale != 1.0:
            cos = cos * self.scale
        return self.attn(x, cos, sin)


def results(model: nn.Module, *given: torch.Tensor) -> list[torch.Tensor]:
    x = given[0].detach().clone().requires_grad_()
    output = model(x, *given[1:])
    generator = torch.Generator().manual_seed(4)
    incoming = torch.randn(output.shape, generator=generator)
    return [output.detach(), *torch.autograd.grad(output, [x, *model.parameters()], incoming)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def kinds(fast: Acceleration) -> dict[str, str]:
    return {site.kind: site.status for site in fast.sites if site.path == "attn"}


def runs(fast: Acceleration, kind: str) -> tuple[int, dict[str, int]]:
    (one,) = [r for r in fast.report().sites if r.kind == kind]
    return one.taken, one.declined


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 6, WIDTH)


@pytest.mark.parametrize("attention, pairs", [(Attention, False), (InPairs, True)])
def test_turned_and_attended(
    attention: type[Attention], pairs: bool, x: torch.Tensor, keep_all: Make
) -> None:
    model = Model(attention, pairs)
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    assert kinds(fast) == {"rotary": "kept", "attention": "kept"}
    assert same(results(model, x), results(plain, x))
    places = torch.tensor([[0, 0, 1, 2, 3], [2, 3, 4, 9, 11]])
    assert same(results(model, x[:, :5], places), results(plain, x[:, :5], places))
    assert runs(fast, "rotary") == (2, {})
    assert runs(fast, "attention") == (2, {})
    fast.undo()
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), results(plain, x), strict=True))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("attention, pairs", [(Backwards, False), (InPairs, False), (Attention, True)])
def test_what_turns_otherwise_is_left(
    attention: type[Attention], pairs: bool, x: torch.Tensor, keep_all: Make
) -> None:
    model = Model(attention, pairs)
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    assert kinds(fast).get("rotary", "refused") == "refused"
    assert [site.status for site in fast.sites if site.path == "tables"] == ["refused"]
    assert same(results(model, x), results(plain, x))


def test_tables_from_elsewhere_are_not_believed(x: torch.Tensor, keep_all: Make) -> None:
    model = Model()
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    model.scale = plain.scale = 1.5
    assert same(results(model, x), results(plain, x))
    assert runs(fast, "rotary") == (0, {rotary.UNKNOWN: 1})

    def first_half_twice(module: nn.Module, given: Any, tables: Any) -> None:
        tables[0][..., :4] *= 0.5  # the halves differ now

    model.scale = plain.scale = 1.0
    for one in (model, plain):
        one.tables.register_forward_hook(first_half_twice)
    assert same(results(model, x), results(plain, x))
    assert runs(fast, "rotary") == (0, {rotary.UNKNOWN: 2})


def test_a_function_that_was_replaced_runs(
    x: torch.Tensor, keep_all: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    for name, other in (("turn", turn_backwards), ("rotate_half", lambda x: x), ("HALVES", 4)):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, other)
            assert same(results(model, x), results(plain, x))
    assert runs(fast, "rotary") == (0, {rebound.CHANGED: 3})
    assert runs(fast, "attention") == (0, {rebound.CHANGED: 3})
    results(model, x)
    assert runs(fast, "rotary")[0] == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_functions_of_their_own(copied: Any, x: torch.Tensor, keep_all: Make) -> None:
    model = Model()
    fast = keep_all(model, x)
    before = results(model, x)
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    taken = runs(fast, "rotary")
    assert same(results(twin, x), before)
    assert runs(fast, "rotary") == taken
    stand_ins = twin.attn.__dict__["forward"].stand_ins.values()
    assert [one.taken for one in stand_ins] == [1, 1]


def test_strict_raises(x: torch.Tensor, keep_all: Make) -> None:
    model = Model()
    keep_all(model, x, strict=True)
    model(x)
    model.scale = 2.0
    with pytest.raises(RuntimeError, match="turn runs as it is written"):
        model(x)


def test_compiled_whole_it_is_the_models_own_code(x: torch.Tensor, keep_all: Make) -> None:
    model = Model()
    before = model(x)
    fast = keep_all(model, x)
    assert torch.allclose(torch.compile(model, backend="eager")(x), before, atol=1e-5)
    assert runs(fast, "rotary") == (0, {})


def test_functions_that_a_forward_reads() -> None:
    names = dict(rebound.functions_read(Attention.forward))
    assert names == {"turn": turn, "F.scaled_dot_product_attention": F.scaled_dot_product_attention}
    inner = dict(rebound.functions_read(nn.MultiheadAttention.forward))
    assert inner["F.multi_head_attention_forward"] is F.multi_head_attention_forward
    dotted = dict(rebound.functions_read(InPairs.forward))
    assert "torch.nn.functional.scaled_dot_product_attention" in dotted


def test_the_weights_of_multihead_attention_and_its_mask(x: torch.Tensor, keep_all: Make) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.wanted = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), False

        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> Any:
            return self.attn(x, x, x, key_padding_mask=hidden, need_weights=self.wanted)[int(self.wanted)]

    model = Heads()
    plain = copy.deepcopy(model)
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[1, 4:] = True
    fast = keep_all(model, (x, hidden))
    assert kinds(fast) == {"attention": "kept"}
    assert same(results(model, x, hidden), results(plain, x, hidden))
    model.wanted = plain.wanted = True
    assert torch.equal(model(x, hidden), plain(x, hidden))
