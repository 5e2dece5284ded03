"""Cross-entropy against torch's own, and the gradient that is written in the forward pass."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fuseline import ops
from fuseline.ops.cross_entropy import reference

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def draw(
    device: str, rows: int = 12, classes: int = 50, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator).to(device, dtype)
    target = torch.randint(classes, (rows,), generator=generator)
    target[1] = -100
    return logits.requires_grad_(), target.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_is_torchs_own(reduction: str, label_smoothing: float, weighted: bool, device: str) -> None:
    logits, target = draw(device)
    weight = torch.linspace(0.5, 2, 50, device=device) if weighted else None
    options = {"weight": weight, "reduction": reduction, "label_smoothing": label_smoothing}
    ours, wanted = ops.cross_entropy(logits, target, **options), F.cross_entropy(logits, target, **options)
    torch.testing.assert_close(ours, wanted)
    found = torch.autograd.grad(ours.sum(), logits)
    torch.testing.assert_close(found, torch.autograd.grad(wanted.sum(), logits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("classes", [50, 3000, 50257])
def test_gradient_written_in_the_forward_pass(
    classes: int, reduction: str, inplace: bool, device: str
) -> None:
    logits, target = draw(device, classes=classes)
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3, "vocab_size": classes - 3}
    target[2] = min(int(target[2]), classes - 4)
    target = target.clamp(max=classes - 4)
    plain = ops.cross_entropy(logits, target, **options)
    factor = torch.linspace(-1, 2, plain.numel(), device=device).view(plain.shape)
    (wanted,) = torch.autograd.grad(plain, logits, factor)
    mine = logits * 1.0
    loss = ops.cross_entropy(mine, target, **options, grad_in_forward=True, inplace=inplace)
    torch.testing.assert_close(loss, plain)
    if inplace:
        assert not torch.equal(mine, logits)
    (found,) = torch.autograd.grad(loss, logits, factor)
    torch.testing.assert_close(found, wanted)
    assert not found[..., classes - 3 :].any()
    assert not found[1].any()


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_of_the_forward_pass_serves_once(device: str) -> None:
    logits, target = draw(device)
    loss = ops.cross_entropy(logits, target, grad_in_forward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="serves one backward pass"):
        loss.backward()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("power", [1, 2])
def test_gradient_of_the_forward_pass_refuses_to_be_differentiated(inplace: bool, power: int) -> None:
    logits, target = draw("cpu")
    loss = ops.cross_entropy(logits * 2, target, grad_in_forward=True, inplace=inplace)
    (grad,) = torch.autograd.grad(loss.pow(power), logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="cross_entropy has no second derivative"):
        grad.pow(2).sum().backward()


def test_in_place_says_so_to_who_saved_the_logits() -> None:
    logits, target = draw("cpu")
    mine = logits * 1.0
    other = mine.exp().sum()  # saves its result, not mine
    square = mine.square().sum()  # saves mine
    loss = ops.cross_entropy(mine, target, inplace=True)
    (loss + other).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_in_place_leaves_logits_alone_without_a_gradient() -> None:
    logits, target = draw("cpu")
    before = logits.detach().clone()
    ops.cross_entropy(logits.detach(), target, inplace=True)
    with torch.no_grad():
        ops.cross_entropy(logits, target, inplace=True)
    with torch.inference_mode():
        ops.cross_entropy(logits, target, inplace=True)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
def test_gradient_in_the_forward_pass_compiles(inplace: bool, device: str) -> None:
    torch._dynamo.reset()

    def step(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 3 * ops.cross_entropy(logits * 2, target, grad_in_forward=True, inplace=inplace)

    logits, target = draw(device)
    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(logits, target)
    torch.testing.assert_close(loss, step(logits, target))
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, torch.autograd.grad(3 * F.cross_entropy(logits * 2, target), logits)[0])


def test_a_target_that_is_no_class_is_named_on_the_cpu() -> None:
    logits, target = draw("cpu")
    target[5] = 50
    with pytest.raises(IndexError, match="target 5 is 50; classes go from 0 to 49"):
        ops.cross_entropy(logits, target)


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [50, 3000, 400_000])
@pytest.mark.parametrize("wrong", [-1, 10**6, 2**40])
def test_a_target_that_is_no_class_gives_nan_on_the_gpu(wrong: int, classes: int) -> None:
    logits, target = draw("cuda", classes=classes)
    target[5] = wrong
    loss = ops.cross_entropy(logits, target, reduction="none")
    assert loss.isnan().nonzero().flatten().tolist() == [5]
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.isnan().any(1).nonzero().flatten().tolist() == [5]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [50257, 50304, 131072])
def test_many_rows_of_a_vocabulary(classes: int, dtype: torch.dtype) -> None:
    """More rows than the device holds at once: blocks that stay take row after row through their ring."""
    logits, target = draw("cuda", rows=500, classes=classes, dtype=dtype)
    exact = logits.detach().double().requires_grad_()
    truth = reference(exact, target)
    (wanted,) = torch.autograd.grad(truth, exact)
    loss = ops.cross_entropy(logits, target, grad_in_forward=True)
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=0.0)
    error = torch.linalg.vector_norm(found.double() - wanted) / torch.linalg.vector_norm(wanted)
    assert error < (1e-5 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"target": torch.zeros(12)}, TypeError, r"target is Float.*target.long\(\)"),
        (
            {"target": torch.zeros(3, dtype=torch.long)},
            ValueError,
            r"target has shape \[3\] and logits \[12, 50\]",
        ),
        ({"reduction": "average"}, ValueError, r"reduction is 'average'"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing is 1.5"),
        ({"soft_cap": 0.0}, ValueError, r"soft_cap is 0; it is finite and above 0"),
        ({"soft_cap": float("inf")}, ValueError, r"soft_cap is inf; it is finite and above 0"),
        ({"vocab_size": 51}, ValueError, r"vocab_size is 51; logits has 50 columns"),
        ({"weight": torch.ones(49)}, ValueError, r"weight has shape \[49\]; it is \[50\]"),
        ({"inplace": True}, ValueError, r"would overwrite a leaf"),
        ({"logits": torch.zeros(12, 0), "vocab_size": None}, ValueError, r"no class to choose from"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    logits, target = draw("cpu")
    with pytest.raises(error, match=message):
        ops.cross_entropy(**{"logits": logits, "target": target, **change})
