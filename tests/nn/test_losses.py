"""`fuseline.nn.CrossEntropyLoss` and `LinearCrossEntropyLoss` against torch's loss of the logits."""

from __future__ import annotations

import pytest
import torch

from fuseline.nn import CrossEntropyLoss, LinearCrossEntropyLoss


@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 7, 2), (3, 7, 2, 4)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cross_entropy_takes_what_torchs_takes(shape: tuple[int, ...], reduction: str) -> None:
    weight = torch.rand(7) + 0.5
    options = {"ignore_index": 3, "reduction": reduction, "label_smoothing": 0.1}
    ours, theirs = CrossEntropyLoss(weight, **options), torch.nn.CrossEntropyLoss(weight, **options)
    logits = torch.randn(shape, requires_grad=True)
    target = torch.randint(7, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    found, wanted = ours(logits, target), theirs(logits, target)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss.sum(), logits)[0] for loss in (found, wanted)), equal_nan=True
    )
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_cross_entropy_writes_the_gradient_where_it_is_told() -> None:
    leaf, target = torch.randn(4, 9, requires_grad=True), torch.randint(9, (4,))
    logits = leaf * 1
    loss = CrossEntropyLoss(inplace=True, z_loss=1e-3)(logits, target)
    (found,) = torch.autograd.grad(loss, leaf)
    (wanted,) = torch.autograd.grad(CrossEntropyLoss(z_loss=1e-3)(leaf, target), leaf)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found, logits.detach())


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_linear_cross_entropy_is_a_head_and_its_loss(chunk_size: int | None) -> None:
    class_weight = torch.rand(10) + 0.5
    loss = LinearCrossEntropyLoss(
        6, 12, bias=True, class_weight=class_weight, vocab_size=10, chunk_size=chunk_size
    )
    hidden, target = torch.randn(3, 5, 6, requires_grad=True), torch.randint(10, (3, 5))
    logits = loss.linear(hidden)[..., :10]
    wanted = torch.nn.CrossEntropyLoss(class_weight)(logits.flatten(0, 1), target.flatten())
    found = loss(hidden, target)
    torch.testing.assert_close(found, wanted)
    leaves = hidden, loss.linear.weight, loss.linear.bias
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves))
    assert set(loss.state_dict()) == {"linear.weight", "linear.bias", "class_weight"}
