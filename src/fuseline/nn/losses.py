"""Losses over Fuseline's ops: cross-entropy of logits, and of a head without storing its logits."""

from __future__ import annotations

import torch

from fuseline.ops import cross_entropy, linear_cross_entropy


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` over Fuseline's op, for targets that are class numbers.

    It takes torch's arguments, and inputs [V], [N, V] or [N, V, d1, ...] (classes in dimension 1). The loss
    is float32. `soft_cap`, `z_loss`, `vocab_size`, `grad_in_forward` and `inplace` are those of
    `fuseline.ops.cross_entropy`. With `inplace` the gradient overwrites the input, so no other code may read
    the input afterwards.
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
    """A linear head and its loss: cross-entropy of linear(input), without storing all logits.

    input is [..., in_features], target [...]. The head is `linear`; its weight may be tied to an embedding's.
    With a padded vocabulary it has `num_classes` rows, of which the first `vocab_size` are classes.
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
