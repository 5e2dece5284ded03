"""Plans of kernels that compute rows of a tensor: softmax, the loss, and the norms."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuseline.errors import InputError
from fuseline.ops.plans.plan import Answer, Plan, one_launch
from fuseline.ops.plans.problem import Rows

NORMS = tuple(f"{of}{kind}_norm" for of in ("", "add_", "dropout_add_") for kind in ("layer", "rms"))


def softmax(rows: Rows, causal: bool = False, masked: bool = False, scale: float = 1.0) -> tuple[Plan, ...]:
    """Of `ops.softmax`, forward and backward."""

    def forward(refused: int) -> Answer:
        mask_in_vectors = rows.length * rows.itemsize % 16 == 0
        options = (scale, bool(causal), bool(masked), mask_in_vectors, rows.fp16)
        return torch.ops.fuseline.plan_softmax_forward(*rows.arguments, [rows.address] * 2, *options, refused)

    def backward(refused: int) -> Answer:
        return torch.ops.fuseline.plan_softmax_backward(
            *rows.arguments, [rows.address] * 3, rows.fp16, refused
        )

    return one_launch("forward", forward), one_launch("backward", backward)


def cross_entropy(
    rows: Rows, weight: bool = False, label_smoothing: float = 0.0, soft_cap: float = 0.0
) -> tuple[Plan, ...]:
    """Of `ops.cross_entropy`, with the gradient of the logits and without."""
    plain = not weight and label_smoothing == 0 and soft_cap == 0

    def with_gradient(grad: bool) -> Callable[[int], Answer]:
        return lambda refused: torch.ops.fuseline.plan_cross_entropy(
            *rows.arguments, [rows.address] * 2, grad, plain, rows.fp16, refused
        )

    return (
        one_launch("loss and gradient", with_gradient(True)),
        one_launch("loss alone", with_gradient(False)),
    )


_NORM_OF = {"": 0, "add": 1, "dropout_add": 2}
"""What a norm is of, as NormOf of csrc/kernels/plans/norms.h counts it."""


def norm(name: str) -> Callable[..., tuple[Plan, ...]]:
    """The function that plans the norm of that name, one of `NORMS`."""
    before, _, kind = name.removesuffix("_norm").rpartition("_")
    of, centred = _NORM_OF[before], kind == "layer"
    added, drops = of > 0, of == 2

    def plans(
        rows: Rows,
        direction: str | None = None,
        fp32_stream: bool = False,
        fp32_weights: bool = False,
        x_bias: bool = False,
    ) -> tuple[Plan, ...]:
        if direction not in (None, "forward", "backward"):
            raise InputError(f"direction is {direction!r}; it is forward or backward.")
        if x_bias and not drops:
            raise InputError(f"x_bias is of the norms behind a dropout; {name} has none.")
        wide = 4 if fp32_stream else rows.itemsize
        given = rows.gpu.numbers(), rows.count, rows.length, [wide, rows.itemsize], rows.address
        wide_weights, fp16 = bool(fp32_weights) or rows.itemsize == 4, rows.dtype == torch.float16

        def forward(refused: int) -> Answer:
            return torch.ops.fuseline.plan_norm_forward(
                *given, fp16, centred, of, drops, wide_weights, refused
            )

        def backward(refused: int) -> Answer:
            of_branch = drops or (added and wide != rows.itemsize)
            there = [drops, added, True, of_branch, True, centred, bool(x_bias)]
            return torch.ops.fuseline.plan_norm_backward(*given, fp16, centred, wide_weights, there, refused)

        asks = {"forward": forward, "backward": backward}
        return tuple(one_launch(work, ask) for work, ask in asks.items() if direction in (None, work))

    return plans
