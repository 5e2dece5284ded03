"""Losses over Fuseline's ops, as modules: cross-entropy of logits, and of a head without its logits."""

from __future__ import annotations

import torch

from fuseline.ops import cross_entropy, linear_cross_entropy


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` over Fuseline's op, for class numbers as targets; the loss is float32.

    Takes what torch's takes, input [V], [N, V] or [N, V, d1, ...] (classes in dimension 1), and `soft_cap`,
    `z_loss`, `vocab_size`, `grad_in_forward`, `inplace` as in `fuseline.ops.cross_entropy`. With `inplace`
    the gradient is written over the input, which then nobody else may read.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        soft_cap: float | None = None,
        z_loss: float = 0.0,
        vocab_size: int | None = None,
        grad_in_forward: bool = False,
        inplace: bool = False,
    ) -> None:
        super().__init__(
            weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
        self.soft_cap, self.z_loss, self.vocab_size = soft_cap, z_loss, vocab_size
        self.grad_in_forward, self.inplace = grad_in_forward, inplace

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(
            input.movedim(1, -1) if input.dim() > 2 else input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            soft_cap=self.soft_cap,
            z_loss=self.z_loss,
            vocab_size=self.vocab_size,
            grad_in_forward=self.grad_in_forward,
            inplace=self.inplace,
        )


class LinearCrossEntropyLoss(torch.nn.Module):
    """A head and its loss: cross-entropy of linear(input) with class numbers, without the logits.

    input is [..., in_features], target [...]. The head is `linear`, whose weight may be tied to an
    embedding's; with a padded vocabulary it has `num_classes` rows, of which `vocab_size` count.
    `class_weight`, the other options and `chunk_size` are those of `fuseline.ops.linear_cross_entropy`.
    """

    reads_weight_of = ("linear",)
    class_weight: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        class_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        soft_cap: float | None = None,
        z_loss: float = 0.0,
        vocab_size: int | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(in_features, num_classes, bias, device=device, dtype=dtype)
        self.register_buffer("class_weight", class_weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.soft_cap, self.z_loss = soft_cap, z_loss
        self.vocab_size, self.chunk_size = vocab_size, chunk_size

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            self.linear.bias,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            soft_cap=self.soft_cap,
            z_loss=self.z_loss,
            vocab_size=self.vocab_size,
            chunk_size=self.chunk_size,
        )
