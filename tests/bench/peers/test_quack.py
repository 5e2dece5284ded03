"""QuACK's adapter over a stand-in of its functions: which way is taken, and what one pass computes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseline.bench.peers import quack
from fuseline.bench.peers.quack import Quack
from fuseline.ops import get
from fuseline.timing import Summary, summarize

ROWS, WIDTH, CLASSES = 24, 16, 40


def cross_entropy_fwd(
    x: Tensor, target: Tensor, *, weight: Tensor | None, ignore_index: int, return_dx: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """As quack's: the loss of each row, and on request the gradient of their sum."""
    wide, factors = x.detach().double().requires_grad_(), None if weight is None else weight.double()
    loss = F.cross_entropy(wide, target, factors, ignore_index=ignore_index, reduction="none")
    if not return_dx:
        return loss.float()
    with torch.enable_grad():
        loss = F.cross_entropy(wide, target, factors, ignore_index=ignore_index, reduction="none")
        (dx,) = torch.autograd.grad(loss.sum(), wide)
    return loss.detach().float(), dx.to(x.dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The modules, and how long their two passes and their chunks are said to take; below 0 they fail."""
    seconds = {"two passes": 0.0, "2048": 0.0, "4096": 0.0, "8192": 0.0, "now": 0.0}
    losses, heads = ModuleType("quack.cross_entropy"), ModuleType("quack.linear_cross_entropy")
    losses.cross_entropy_fwd = cross_entropy_fwd

    def in_two_passes(*arguments: Tensor, **options: object) -> Tensor:
        seconds["now"] += seconds["two passes"]
        return F.cross_entropy(*arguments, **options)

    losses.cross_entropy = in_two_passes

    def by_chunks(x: Tensor, weight: Tensor, target: Tensor, chunk_size: int, tuned: bool) -> Tensor:
        assert tuned
        assert chunk_size != x.shape[1]
        if seconds[str(chunk_size)] < 0:
            raise RuntimeError("it does not compile")
        seconds["now"] += seconds[str(chunk_size)]
        seconds["taken"] = chunk_size
        return F.cross_entropy(x @ weight.T, target)

    heads.chunked_linear_cross_entropy = by_chunks
    package = ModuleType("quack")
    package.cross_entropy, package.linear_cross_entropy = losses, heads
    for module in (package, losses, heads):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def by_the_stand_ins(call: Callable[[], object], *_: object, **__: object) -> Summary:
        begin = seconds["now"]
        call()
        return summarize([1e6 * (seconds["now"] - begin)])

    monkeypatch.setattr(quack, "_CHOSEN", {})
    monkeypatch.setattr(quack, "time_calls", by_the_stand_ins)
    return seconds


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_pass_is_the_loss_and_its_gradient(
    stand_in: dict[str, float], reduction: str, weighted: bool
) -> None:
    stand_in["two passes"] = 0.02
    logits = torch.randn(ROWS, CLASSES, requires_grad=True)
    target = torch.randint(CLASSES, (ROWS,))
    target[::5] = -100
    weight = torch.rand(CLASSES) + 0.5 if weighted else None
    inputs = {"logits": logits, "target": target, "reduction": reduction, "grad_in_forward": True}
    if weight is not None:
        inputs["weight"] = weight
    loss = Quack().bind(get("cross_entropy"), inputs)()
    assert list(quack._CHOSEN.values()) == ["one pass"]
    wanted = F.cross_entropy(logits, target, weight, reduction=reduction)
    torch.testing.assert_close(loss, wanted)
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, logits)[0])


def test_two_passes_where_the_gradient_is_not_written_forward(stand_in: dict[str, float]) -> None:
    inputs = {"logits": torch.randn(ROWS, CLASSES, requires_grad=True), "target": torch.zeros(ROWS).long()}
    Quack().bind(get("cross_entropy"), {**inputs, "grad_in_forward": False})()
    Quack().bind(get("cross_entropy"), {**inputs, "grad_in_forward": True, "reduction": "none"})()
    with torch.no_grad():  # and a forward alone has no gradient to write
        Quack().bind(get("cross_entropy"), {**inputs, "grad_in_forward": True})()
    assert quack._CHOSEN == {}


def test_the_heads_chunk_is_the_fastest_that_works(stand_in: dict[str, float]) -> None:
    stand_in.update({"2048": 0.01, "4096": -1.0, "8192": 0.001})
    hidden, weight = (torch.randn(n, WIDTH, requires_grad=True) for n in (ROWS, CLASSES))
    inputs = {"hidden": hidden, "weight": weight, "target": torch.zeros(ROWS).long()}
    Quack().bind(get("linear_cross_entropy"), inputs)()
    assert stand_in["taken"] == 8192
    wide = {"hidden": torch.randn(ROWS, 8192, requires_grad=True), "weight": torch.randn(CLASSES, 8192)}
    Quack().bind(get("linear_cross_entropy"), {**inputs, **wide})()
    assert stand_in["taken"] == 2048


def test_if_nothing_works_the_failure_is_the_peers(stand_in: dict[str, float]) -> None:
    stand_in.update(dict.fromkeys(("2048", "4096", "8192"), -1.0))
    hidden, weight = (torch.randn(n, WIDTH, requires_grad=True) for n in (ROWS, CLASSES))
    call = Quack().bind(
        get("linear_cross_entropy"), {"hidden": hidden, "weight": weight, "target": torch.zeros(ROWS).long()}
    )
    with pytest.raises(RuntimeError, match="does not compile"):
        call()
