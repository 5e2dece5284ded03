"""cuDNN keeps one plan for the gradients of all layouts. Eager and compiled calls over one shape, in any
order, are right all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuseline.ops import attention

pytestmark = pytest.mark.gpu
SHAPE = (2, 3, 40, 32)


def by_query(y_BHTD: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient comes as [B, T, H, D] lies."""
    return y_BHTD.transpose(1, 2).contiguous().flatten(2).float().pow(3).mean()


def by_head(y_BHTD: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient comes as [B, H, T, D] lies."""
    return y_BHTD.contiguous().flatten(2).float().pow(3).mean()


def by_column(y_BHTD: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient comes as [B, H, D, T] lies."""
    return y_BHTD.mT.contiguous().flatten(2).float().pow(3).mean()


@pytest.mark.parametrize("dropout_p", [0.0, 0.125])
@pytest.mark.parametrize("order", ["compiled first", "eager first"])
def test_gradients_of_all_layouts_compiled_or_not(order: str, dropout_p: float) -> None:
    if dropout_p and order == "eager first":
        pytest.skip("once is enough")
    torch._dynamo.reset()
    # Shapes that no other test has, so that the plan is made here.
    shape = (*SHAPE[:2], SHAPE[2] + 8 * (order == "eager first") + 16 * (dropout_p > 0), SHAPE[3])
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_() for _ in range(3)
    )

    def step(loss: Callable[[torch.Tensor], torch.Tensor], backend: str) -> list[torch.Tensor]:
        if dropout_p:
            torch.manual_seed(5)
        y = attention(q, k, v, causal=True, dropout_p=dropout_p, backend=backend)
        return list(torch.autograd.grad(loss(y), (q, k, v)))

    def attend(loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return loss(attention(q, k, v, causal=True, dropout_p=dropout_p, backend="cudnn"))

    losses = (by_query, by_head, by_column)
    for loss in losses if order == "compiled first" else losses[::-1]:
        compiled = torch.compile(attend, fullgraph=True, dynamic=False)
        found = {
            "compiled": lambda compiled=compiled, loss=loss: torch.autograd.grad(compiled(loss), (q, k, v)),
            "eager": lambda loss=loss: step(loss, "cudnn"),
        }
        wanted = None if dropout_p else step(loss, "math")
        for name in ("compiled", "eager") if order == "compiled first" else ("eager", "compiled"):
            torch.manual_seed(5)
            grads = found[name]()
            if wanted is None:
                wanted = list(grads)  # the same seed drops the same weights
            for i, (mine, right) in enumerate(zip(grads, wanted, strict=True)):
                away = float((mine.double() - right.double()).norm() / right.double().norm())
                assert away < 0.03, f"{name}, gradient {i}, {loss.__name__}"
