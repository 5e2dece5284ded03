"""A step over an accelerated model: the numbers of a plain loop, with all that a loop has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuseline.acceleration.deferred_logits import DeferredLogits, Head
from fuseline.acceleration.handle import Acceleration
from fuseline.errors import InputError

Make = Callable[..., Acceleration]
VOCABULARY = 50


class Language(nn.Module):
    """Tokens to a loss, as models of `transformers` give it."""

    def __init__(self, p: float = 0.0, shift: bool = True) -> None:
        super().__init__()
        self.table, self.norm, self.drop = nn.Embedding(VOCABULARY, 16), nn.LayerNorm(16), nn.Dropout(p)
        self.head, self.shift = nn.Linear(16, VOCABULARY, bias=False), shift

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.drop(self.norm(self.table(tokens))))
        if labels is None:
            return {"logits": logits}
        wide = logits.float()
        if self.shift:
            loss = F.cross_entropy(wide[..., :-1, :].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        else:
            loss = nn.CrossEntropyLoss()(wide.view(-1, VOCABULARY), labels.view(-1))
        return {"loss": loss, "logits": logits}


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    drawn = [torch.randint(VOCABULARY, (2, 7)) for _ in range(count)]
    return [{"tokens": tokens, "labels": tokens} for tokens in drawn]


def loop(
    model: nn.Module,
    groups: list[tuple[dict[str, torch.Tensor], ...]],
    *,
    grad_clip: float = 1.0,
    decay: float = 1.0,
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    losses = []
    for group in groups:
        optimizer.zero_grad()
        total = 0.0
        for batch in group:
            loss = model(**batch)["loss"] / len(group)
            loss.backward()
            total += loss.item()
        if grad_clip:
            nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("accumulation, grad_clip, decay", [(1, 1.0, 1.0), (1, 0.0, 0.5), (3, 0.1, 0.8)])
def test_losses_and_weights_are_those_of_a_loop(
    accumulation: int, grad_clip: float, decay: float, device: str, keep_all: Make
) -> None:
    model = Language().to(device)
    plain = copy.deepcopy(model)
    drawn = [{n: t.to(device) for n, t in batch.items()} for batch in batches(6 * accumulation)]
    groups = [tuple(drawn[i : i + accumulation]) for i in range(0, len(drawn), accumulation)]
    expected = loop(plain, groups, grad_clip=grad_clip, decay=decay)

    fast = keep_all(model, drawn[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    step = fast.training_step(
        optimizer, precision="fp32", accumulation=accumulation, grad_clip=grad_clip, scheduler=scheduler
    )
    losses = [float(step(*group)) for group in groups]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert step.execution == ("eager" if device == "cpu" else "recorded"), step.reason
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=2e-4)
    assert fast.report().declined == 0
    assert sum(fast.report().eager.values()) == (len(groups) if device == "cpu" else 0)
    if device == "cpu":
        assert f"{len(groups)} of the steps and compiled calls were not recorded" in str(fast.report())
    step.close()


def _never(self: DeferredLogits) -> torch.Tensor:
    raise AssertionError("the logits were computed")


@pytest.mark.parametrize("shift", [True, False])
def test_head_and_loss_are_one_and_the_logits_are_never_whole(
    shift: bool, keep_all: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = Language(shift=shift), batches(1)[0]
    fast = keep_all(model, batch)
    (site,) = [site for site in fast.sites if site.kind == "head_loss"]
    assert (site.path, site.status) == ("head", "found")
    expected = model(**batch)["loss"]
    assert type(model(**batch)["logits"]) is torch.Tensor

    monkeypatch.setattr(DeferredLogits, "logits", _never)
    step = fast.training_step(torch.optim.SGD(model.parameters(), lr=0.0), precision="fp32")
    assert float(step(batch)) == pytest.approx(expected.item(), rel=1e-5)
    assert "forward" not in vars(model.head)


def test_logits_that_are_read_are_those_of_the_head() -> None:
    hidden, head = torch.randn(2, 5, 16), nn.Linear(16, VOCABULARY)
    logits = head(hidden)

    def deferred() -> DeferredLogits:
        return DeferredLogits.of(Head(hidden, head.weight, head.bias))

    assert deferred().shape == logits.shape
    assert deferred().dtype is torch.float32
    assert torch.equal(deferred() / 2, logits / 2)
    assert torch.equal(torch.tanh(deferred()), torch.tanh(logits))
    assert torch.equal(deferred()[:, -1].argmax(-1), logits[:, -1].argmax(-1))
    assert torch.equal(deferred()[..., :7] + 0, logits[..., :7])
    assert torch.equal(deferred().view(-1, VOCABULARY) + 0, logits.view(-1, VOCABULARY))
    assert torch.equal(deferred().view(5, 2, -1) + 0, logits.view(5, 2, -1))
    assert torch.equal(deferred().view(-1, 25) + 0, logits.view(-1, 25))
    assert torch.equal(deferred().transpose(1, 2) + 0, logits.transpose(1, 2))
    target = torch.randint(VOCABULARY, (2, 5))
    by_class = F.cross_entropy(deferred().transpose(1, 2), target, reduction="none")
    assert torch.equal(by_class, F.cross_entropy(logits.transpose(1, 2), target, reduction="none"))
    soft = torch.softmax(torch.randn(10, VOCABULARY), -1)
    ours = F.cross_entropy(deferred().view(-1, VOCABULARY), soft)
    assert torch.equal(ours, F.cross_entropy(logits.view(-1, VOCABULARY), soft))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"ignore_index": 3},
        {"label_smoothing": 0.1},
        {"weight": torch.rand(VOCABULARY)},
    ],
)
def test_the_loss_of_deferred_logits(options: dict[str, Any]) -> None:
    hidden, head = torch.randn(9, 16, requires_grad=True), nn.Linear(16, VOCABULARY)
    target = torch.randint(VOCABULARY, (9,))
    theirs = F.cross_entropy(head(hidden), target, **options)
    ours = F.cross_entropy(DeferredLogits.of(Head(hidden, head.weight, head.bias)), target, **options)
    assert type(ours) is torch.Tensor
    assert torch.allclose(ours, theirs, rtol=1e-5)
    wanted = [hidden, head.weight, head.bias]
    for one, other in zip(
        torch.autograd.grad(ours, wanted), torch.autograd.grad(theirs, wanted), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _whole(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 7] = -2.0
    return logits.view(-1, VOCABULARY)


def _view_before(logits: torch.Tensor) -> torch.Tensor:
    flat = logits.view(-1, VOCABULARY)
    logits[..., 7] = -2.0
    return flat


def _copy_before(logits: torch.Tensor) -> torch.Tensor:
    rows = logits[:, 1:].contiguous()
    logits[..., 7] = -2.0
    return rows.view(-1, VOCABULARY)


def _through_a_view(logits: torch.Tensor) -> torch.Tensor:
    logits[:, :3].mul_(0.5)
    return logits.float().flatten(0, 1)


@pytest.mark.parametrize("write", [_whole, _view_before, _copy_before, _through_a_view])
def test_who_writes_to_deferred_logits_is_seen(write: Callable[[torch.Tensor], torch.Tensor]) -> None:
    hidden, head = torch.randn(2, 5, 16, requires_grad=True), nn.Linear(16, VOCABULARY)
    theirs = write(head(hidden))
    target = torch.randint(VOCABULARY, (len(theirs),))
    theirs = F.cross_entropy(theirs, target)
    ours = F.cross_entropy(write(DeferredLogits.of(Head(hidden, head.weight, head.bias))), target)
    assert torch.allclose(ours, theirs, rtol=1e-6)
    wanted = [hidden, head.weight, head.bias]
    for one, other in zip(
        torch.autograd.grad(ours, wanted), torch.autograd.grad(theirs, wanted), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_compiled_loss_gets_logits(keep_all: Make) -> None:
    torch._dynamo.reset()
    model, batch = Language(), batches(1)[0]
    expected = model(**batch)["loss"]
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    fast = keep_all(model, batch)
    step = fast.training_step(torch.optim.SGD(model.parameters(), lr=0.0), precision="fp32")
    assert float(step(batch)) == pytest.approx(expected.item(), rel=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "read", [lambda logits: logits + 0, lambda logits: F.cross_entropy(logits, logits.argmax(-1))]
)
def test_a_write_to_the_hidden_states_raises(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    hidden, head = torch.randn(9, 16), nn.Linear(16, VOCABULARY)
    rows = DeferredLogits.of(Head(hidden, head.weight, head.bias))[2:].float()
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="written to in place"):
        read(rows)


class _Penalty(torch.autograd.Function):
    """Autograd calls it with the logits themselves."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (logits,) = ctx.saved_tensors
        return grads[0] * 2 * logits / logits.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_of_autograd_gets_logits_with_a_gradient(dtype: torch.dtype) -> None:
    hidden, head = torch.randn(9, 16, requires_grad=True), nn.Linear(16, VOCABULARY)
    target, wanted = torch.randint(VOCABULARY, (9,)), [hidden, head.weight, head.bias]
    found = []
    for deferred in (False, True):
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            logits = DeferredLogits.of(Head(hidden, head.weight, head.bias)) if deferred else head(hidden)
            loss = F.cross_entropy(logits.float(), target) + _Penalty.apply(logits)
        found.append([loss, *torch.autograd.grad(loss, wanted)])
    for theirs, ours in zip(*found, strict=True):
        assert torch.linalg.vector_norm(ours - theirs) <= 4 * torch.finfo(dtype).eps * theirs.norm()


CAPPINGS: dict[str, Any] = {
    "whole": lambda logits: torch.tanh(logits / 2.0) * 2.0,
    "cast before": lambda logits: (logits.float() / 2.0).tanh() * 2.0,
    "of another height": lambda logits: torch.tanh(logits / 2.0) * 3.0,
    "no division": lambda logits: torch.tanh(logits) * 2.0,
    "half": lambda logits: torch.tanh(logits / 2.0),
    "twice": lambda logits: torch.tanh(torch.tanh(logits / 2.0) * 2.0 / 2.0) * 2.0,
}


@pytest.mark.parametrize("name", CAPPINGS)
def test_softly_capped_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = torch.randn(9, 16, requires_grad=True), nn.Linear(16, VOCABULARY)
    target = torch.randint(VOCABULARY, (9,))
    capped = CAPPINGS[name]
    theirs = F.cross_entropy(capped(head(hidden)), target)
    computed: list[Head] = []
    logits = Head.logits
    monkeypatch.setattr(Head, "logits", lambda self: computed.append(self) or logits(self))
    ours = F.cross_entropy(capped(DeferredLogits.of(Head(hidden, head.weight, head.bias))), target)
    assert bool(computed) is (name not in ("whole", "cast before"))
    assert torch.allclose(ours, theirs, rtol=1e-5)
    wanted = [hidden, head.weight, head.bias]
    for one, other in zip(
        torch.autograd.grad(ours, wanted), torch.autograd.grad(theirs, wanted), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_sites_are_proved_anew_under_autocast(keep_all: Make) -> None:
    model, (first, *rest) = Language(), batches(3)
    fast = keep_all(model, first)
    step = fast.training_step(torch.optim.AdamW(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**first)["loss"].item()
    assert float(step(first)) == pytest.approx(expected, rel=2e-2)
    before = fast.report().taken
    for batch in rest:
        step(batch)
    assert fast.report().taken > before


def test_a_loss_of_ones_own(keep_all: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Language(), batches(1)[0]
    fast = keep_all(model, {"tokens": batch["tokens"]})

    def loss(output: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output["logits"].view(-1, VOCABULARY), batch["tokens"].view(-1))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = fast.training_step(optimizer, precision="fp32", loss=loss)
    expected = loss(model(batch["tokens"]), batch)
    assert "head_loss" not in {site.kind for site in fast.sites}
    assert float(step({"tokens": batch["tokens"]})) == pytest.approx(expected.item(), rel=1e-5)
    (site,) = [site for site in fast.sites if site.kind == "head_loss"]
    assert (site.path, site.status) == ("head", "found")
    monkeypatch.setattr(DeferredLogits, "logits", _never)
    assert float(step({"tokens": batch["tokens"]})) == pytest.approx(expected.item(), rel=1e-5)
    monkeypatch.undo()
    with pytest.raises(InputError, match="without a loss"):
        fast.training_step(optimizer, precision="fp32")({"tokens": batch["tokens"]})


def test_what_the_user_got_wrong(keep_all: Make) -> None:
    model, batch = Language(), batches(1)[0]
    fast, optimizer = keep_all(model, batch), torch.optim.AdamW(model.parameters())
    with pytest.raises(InputError, match="at least one"):
        fast.training_step(optimizer, accumulation=0)
    with pytest.raises(InputError, match="not negative"):
        fast.training_step(optimizer, grad_clip=-1.0)
    with pytest.raises(InputError, match="precision"):
        fast.training_step(optimizer, precision="bf17")
    with pytest.raises(InputError, match="LBFGS"):
        fast.training_step(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(InputError, match="2 micro-batches"):
        fast.training_step(optimizer, accumulation=2)(batch)


def test_a_compiled_call_is_the_models_own(keep_all: Make) -> None:
    model, batch = Language().eval(), batches(1)[0]
    fast = keep_all(model, batch, train=False)
    out = fast.compiled_call(batch["tokens"])
    assert not out["logits"].requires_grad
    assert torch.equal(out["logits"], model(batch["tokens"])["logits"])


@pytest.mark.gpu
def test_a_recorded_step_sees_new_learning_rates(keep_all: Make) -> None:
    model = Language().cuda()
    drawn = [{n: t.cuda() for n, t in batch.items()} for batch in batches(1)]
    fast = keep_all(model, drawn[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = fast.training_step(optimizer)
    for _ in range(2):
        step(drawn[0])
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, group["weight_decay"]
    before = [p.detach().clone() for p in model.parameters()]
    step(drawn[0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.gpu
def test_a_compiled_call_is_recorded_by_shape(keep_all: Make) -> None:
    model = Language().cuda().eval()
    first, second = (batch["tokens"].cuda() for batch in batches(2))
    fast = keep_all(model, first, train=False)
    for tokens in (first, second, first[:, :3]):
        ours = fast.compiled_call(tokens)["logits"]
        assert torch.allclose(ours, model(tokens)["logits"], atol=1e-5)
    with torch.no_grad():
        model.head.weight.zero_()
    assert not fast.compiled_call(first)["logits"].any()
