"""Forms of a recorded step: which blocks are compiled, which form is kept, and that nothing else changes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.acceleration.compiled_call import CompiledCall
from fuseline.acceleration.forms import KERNELS, CompiledBlocks, Form, choose, distance, repeated_blocks
from fuseline.acceleration.handle import Acceleration

PLAIN, COMPILED, OTHER = (Form(name, contextlib.nullcontext) for name in (KERNELS, "compiled", "other"))


class Block(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.mlp, self.number = nn.Sequential(nn.Linear(4, 4), nn.GELU()), number

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.mlp(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x, scale=0.5))
        return self.head(x)


def test_blocks_are_the_outermost_lists_of_modules_with_modules_inside() -> None:
    stack = Stack()
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), stack)) == list(stack.blocks)
    both = nn.ModuleDict({"encoder": Stack(), "decoder": stack})
    assert len(repeated_blocks(both)) == 6
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    nested = nn.ModuleList([stack, Stack()])
    assert repeated_blocks(nested) == list(nested)


def test_compiled_blocks_stand_only_inside_and_compute_the_same() -> None:
    stack, x = Stack(), torch.randn(5, 4, requires_grad=True)
    expected = stack(x)
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    own = lambda y, scale: 2 * y  # noqa: E731
    stack.blocks[1].forward = own
    blocks = CompiledBlocks(repeated_blocks(stack), backend)
    with blocks.in_place():
        assert torch.allclose(stack(x), expected)  # the class's forward, not what covered it
    assert len(seen) == 1  # blocks that are alike share it
    assert stack.blocks[1].__dict__["forward"] is own
    del stack.blocks[1].__dict__["forward"]
    assert not any("forward" in module.__dict__ for module in stack.modules())
    assert torch.equal(stack(x), expected)
    blocks.close()
    with blocks.in_place():
        stack(x)
    assert len(seen) == 2


def test_the_fastest_form_that_is_right_is_kept() -> None:
    seconds = {KERNELS: 1.0, "compiled": 0.5, "other": 0.1}

    def why_wrong(form: Form) -> str | None:
        return "it is wrong" if form is OTHER else None

    choice = choose([PLAIN, COMPILED, OTHER], lambda form: seconds[form.name], why_wrong)
    assert choice.form is COMPILED
    assert choice.ms == {KERNELS: 1000.0, "compiled": 500.0}
    assert choice.refused == {"other": "it is wrong"}
    seconds["compiled"] = 0.995  # no more than noise
    assert choose([PLAIN, COMPILED, OTHER], lambda form: seconds[form.name], why_wrong).form is PLAIN


def test_a_form_that_fails_is_refused_and_the_first_raises() -> None:
    def fails(form: Form) -> float:
        if form is not PLAIN:
            raise RuntimeError("no compiler\nand more")
        return 1.0

    choice = choose([PLAIN, COMPILED], fails, lambda _: None)
    assert (choice.form, choice.refused) == (PLAIN, {"compiled": "no compiler"})
    with pytest.raises(RuntimeError, match="no compiler"):
        choose([COMPILED, PLAIN], fails, lambda _: None)
    assert choose([COMPILED], fails, lambda _: None).form is COMPILED  # nothing to compare


def test_distance_is_a_share_of_the_length() -> None:
    wanted = [torch.tensor([3.0]), torch.tensor([[4.0]])]
    assert distance(wanted, wanted) == 0.0
    assert distance([torch.tensor([3.0]), torch.tensor([[3.0]])], wanted) == pytest.approx(0.2)
    assert distance([torch.ones(1)], [torch.zeros(1)]) == 1.0


def train(fast: Acceleration, batches: list[torch.Tensor], **options: Any) -> tuple[Any, list[float]]:
    optimizer = torch.optim.AdamW(fast.model.parameters(), lr=1e-2)
    step = fast.training_step(
        optimizer, precision="fp32", loss=lambda output, _: output.square().mean(), **options
    )
    return step, [float(step(batch)) for batch in batches]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_trains_alike_in_every_form(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled:  # whatever is faster on so small a model
        monkeypatch.setattr("fuseline.acceleration.forms.GAIN", float("inf"))
    torch.manual_seed(0)
    model = Stack().cuda()
    plain = copy.deepcopy(model)
    batches = [torch.randn(8, 4, device="cuda") for _ in range(4)]
    step, losses = train(Acceleration(model), batches, compiled=compiled)
    assert step.execution == "recorded"
    assert step.choice.form.name == ("compiled" if compiled else KERNELS), step.choice.refused
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch, loss in zip(batches, losses, strict=True):
        optimizer.zero_grad()
        wanted = plain(batch).square().mean()
        wanted.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        assert loss == pytest.approx(wanted.item(), rel=1e-4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.gpu
def test_a_call_is_alike_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuseline.acceleration.forms.GAIN", float("inf"))
    model = Stack().cuda().eval()
    fast = Acceleration(model)
    for rows in (8, 3):
        x = torch.randn(rows, 4, device="cuda")
        assert torch.allclose(fast.compiled_call(x), model(x), atol=1e-5)
    call = fast._call
    assert isinstance(call, CompiledCall)
    assert call.choice is not None
    assert (call.reason, call.choice.form.name) == ("", "compiled")


@pytest.mark.gpu
def test_masks_of_every_batch_are_heeded_and_full_ones_cost_nothing() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    model = transformers.LlamaForCausalLM(config).cuda()
    plain = copy.deepcopy(model)
    tokens = torch.randint(64, (2, 16), device="cuda")
    full = torch.ones_like(tokens)
    padded = full.clone()
    padded[0, 9:] = 0
    fast = Acceleration(model)
    step = fast.training_step(torch.optim.AdamW(model.parameters(), lr=1e-3), precision="fp32", grad_clip=0.0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for mask in (None, full, padded, full, padded.flip(0)):
        batch = {"input_ids": tokens, "labels": tokens, **({} if mask is None else {"attention_mask": mask})}
        optimizer.zero_grad()
        wanted = plain(**batch).loss
        wanted.backward()
        optimizer.step()
        assert float(step(batch)) == pytest.approx(wanted.item(), rel=1e-4)
    assert step.execution == "recorded", step.reason


@pytest.mark.gpu
def test_a_recording_that_breaks_leaves_random_numbers_as_they_were() -> None:
    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.dropout(self.layer(x), 0.5)
            return y * float(y.sum() > -1e9)  # waits for the device, which a recording must not

    model, batches = Waiting().cuda(), [torch.randn(4, 8, device="cuda") for _ in range(3)]
    torch.manual_seed(5)
    step, losses = train(Acceleration(model), batches, compiled=False)
    assert step.execution == "eager"
    assert "could not be recorded" in step.reason
    torch.manual_seed(5)
    with torch.no_grad():
        expected = nn.functional.dropout(torch.ones(1000, device="cuda"), 0.5)
    torch.manual_seed(5)
    assert torch.equal(nn.functional.dropout(torch.ones(1000, device="cuda"), 0.5), expected)
    assert len(set(losses)) == 3
