"""A GPT whose norms leave their weight and bias to the layers behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fuseline.nn
from fuseline.models import gpt_block
from fuseline.models.gpt import GPT, GPTConfig

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
B, T, C, LAYERS = 3, 11, 48, 2


def model(device: str, **changes: object) -> GPT:
    """One whose norms are not ones and zeros."""
    sizes = {"block_size": 16, "vocab_size": 37, "num_layers": LAYERS, "num_heads": 4, "embed_dim": C}
    torch.manual_seed(0)
    made = GPT(GPTConfig(**{**sizes, "norm": "fuseline", "loss": "fuseline", **changes}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.05))
    return made.to(device)


@contextmanager
def folding(on: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_block, "FOLD_FROM", B * T if on else B * T + 1)
        yield


def batch(device: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(37, (B, T + 1), generator=torch.Generator().manual_seed(1)).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def step(
    model: nn.Module, device: str, folds: bool, dtype: torch.dtype | None = torch.bfloat16
) -> list[Tensor]:
    """The loss and all gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)  # of dropout
    narrow = torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    with folding(folds), narrow:
        loss = model(*batch(device))
    loss.backward()
    return [
        loss.detach(),
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


def kept(model: nn.Module, device: str, folds: bool) -> list[torch.dtype]:
    """The dtypes of the streams that a forward keeps."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == B * T * C and tensor.is_floating_point():
            found[tensor.data_ptr()] = tensor.detach()
        return tensor

    with (
        folding(folds),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast(device, dtype=torch.bfloat16),
    ):
        model(*batch(device))
    return [tensor.dtype for tensor in found.values()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_as_near_as_without(bias: bool, device: str) -> None:
    made = model(device, bias=bias)
    exact = step(made, device, False, None)
    near, found = step(made, device, False), step(made, device, True)
    assert len(found) == len(near) == len(exact)
    assert _distance(found, exact) < 1.3 * _distance(near, exact)
    assert abs(found[0] - exact[0]) < 2e-3 * exact[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
def test_the_same_is_dropped(bias: bool, device: str) -> None:
    """In float32 attention may run by another kernel on a GPU, and drop other weights."""
    made = model(device, bias=bias, dropout=0.2)
    near, found = step(made, device, False), step(made, device, True)
    assert abs(found[0] - near[0]) < 2e-3 * near[0]
    assert _distance(found, near) < 0.03 * _distance(near, [torch.zeros_like(each) for each in near])


def _distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return sum(float((one - other).double().square().sum()) for one, other in pairs) ** 0.5


def test_only_the_last_norm_keeps_the_stream() -> None:
    made = model("cpu", attention="flash")  # by formula attention keeps float32 of its own
    assert kept(made, "cpu", False).count(torch.float32) == 2 * LAYERS + 1
    assert kept(made, "cpu", True).count(torch.float32) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_without_autocast_or_training_nothing_is_folded(device: str) -> None:
    made = model(device)
    for ours, theirs in zip(step(made, device, True, None), step(made, device, False, None), strict=True):
        assert torch.equal(ours, theirs)
    losses = []
    for folds in (False, True):
        with folding(folds), torch.no_grad():
            losses.append(made.eval()(*batch(device)))
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    "part", ["ln_1", "attn", "attn.c_attn", "attn.resid_dropout", "ln_2", "mlp", "mlp.c_fc", "mlp.dropout"]
)
def test_what_is_listened_to_is_not_folded(part: str) -> None:
    made = model("cpu")
    near = step(made, "cpu", False)
    seen = []
    for block in made.transformer.h:
        block.get_submodule(part).register_forward_hook(lambda *_: seen.append(part))
    found = step(made, "cpu", True)
    assert len(seen) == LAYERS or part.startswith("ln")
    for ours, theirs in zip(found, near, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.02 * float(theirs.abs().max()))


def narrowed(*parts: str) -> GPT:
    made = model("cpu")
    for block in made.transformer.h:
        for part in parts:
            block.get_submodule(part).bfloat16()
    return made


def without_affine() -> GPT:
    made = model("cpu")
    for block in made.transformer.h:
        for name in ("ln_1", "ln_2"):
            setattr(block, name, fuseline.nn.LayerNorm(C, elementwise_affine=False))
    return made


@pytest.mark.parametrize(
    "made",
    [
        partial(narrowed, "attn", "mlp"),
        partial(narrowed, "attn.c_attn", "mlp.c_fc"),
        partial(narrowed, "ln_1", "ln_2"),
        without_affine,
    ],
    ids=["branches in 16 bits", "layers in 16 bits", "norms in 16 bits", "norms without weight"],
)
def test_other_dtypes_and_norms_without_weight_are_not_folded(made: Callable[[], GPT]) -> None:
    for ours, theirs in zip(step(made(), "cpu", True), step(made(), "cpu", False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_to_one_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(device: str) -> bool:
        raise RuntimeError("the compiler of torch 2.11 breaks the graph here")

    monkeypatch.setattr(torch.amp, "is_autocast_available", breaks)
    made = model(device)
    wanted = step(made, device, True)
    found = step(torch.compile(made, fullgraph=True, backend="aot_eager"), device, True)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.02 * float(theirs.abs().max()))
