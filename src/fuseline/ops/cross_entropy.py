"""Cross-entropy of logits with class targets; on request the same pass writes the gradient.

    z = soft_cap * tanh(logits / soft_cap) over the columns that count (no cap: z = logits)
    lse = log(sum(exp(z)))
    loss = (1 - s) * w[t] * (lse - z[t]) + s / V * sum(w * (lse - z)) + z_loss * lse^2

with s the label smoothing and w the class weights (1 without). logits is [..., V], target [...]. dtypes:
float32, float16, bfloat16, float64 (on a GPU float64 runs the reference); targets int64 or int32. The loss is
float32 (float64 for float64), as are all sums. `mean` divides by the sum of w[t] over the targets that are
not ignored (with none left: NaN, as in torch).

A target that is neither a class nor `ignore_index` raises IndexError on a CPU. On a GPU the host does not
wait for the device, so the loss and the gradient of that row are NaN instead. Not twice differentiable.

Sources: label smoothing, Szegedy et al., "Rethinking the Inception Architecture", 2016, section 7; the soft
cap, Gemma 2, 2024, section 2; the z-loss, PaLM, 2022, section 5; the gradient in the forward pass, Hsu et
al., "Liger Kernel", 2024, section 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from fuseline import native
from fuseline.native import direct
from fuseline.ops.op import Case, Op, register


def reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    grad_in_forward: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    """The definition in plain PyTorch, for every device; autograd computes the gradient."""
    kept = target != ignore_index
    z = logits[..., :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
    z = z.masked_fill(~kept.unsqueeze(-1), 0.0)  # what is ignored counts for nothing, be it NaN
    if soft_cap is not None:
        z = soft_cap * torch.tanh(z / soft_cap)
    log_p = torch.log_softmax(z, -1)
    classes = target.masked_fill(~kept, 0).long()
    weights = z.new_ones(z.shape[-1]) if weight is None else weight.to(z.dtype)
    of_target = weights[classes]
    loss = -(1 - label_smoothing) * of_target * log_p.gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        loss = loss - label_smoothing / z.shape[-1] * (weights * log_p).sum(-1)
    if z_loss:
        loss = loss + z_loss * _logsumexp(z).square()
    loss = loss.masked_fill(~kept, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / of_target.masked_fill(~kept, 0.0).sum() if reduction == "mean" else loss.sum()


def _logsumexp(z: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(z))) whose gradient is the softmax at any size of z. That of `torch.logsumexp` is
    exp(z - lse), which is 1 for each of two equal scores where lse rounds to their size."""
    largest = z.detach().amax(-1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, 0.0)
    return (z - largest).exp().sum(-1).log() + largest.squeeze(-1)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    grad_in_forward: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    """The loss of logits [..., V] against the classes in target [...].

    Args:
        logits: [..., V]; float32, float16, bfloat16 or float64.
        target: [...], int64 or int32: classes below `vocab_size`, or `ignore_index` for rows without loss.
        weight: [vocab_size], of a floating dtype: a factor for each class. Has no gradient.
        label_smoothing: the share of each target that is spread over all classes.
        reduction: "mean", "sum" or "none" (a loss for each target).
        soft_cap: bounds the logits smoothly to -soft_cap .. soft_cap first.
        z_loss: factor on the square of the logsumexp, which keeps logits from drifting.
        vocab_size: the number of columns that are classes; None for all. The other columns of a padded
            vocabulary get probability and gradient zero.
        grad_in_forward: compute the gradient of the logits in the forward pass, which then reads the logits
            once for loss and gradient. It serves one backward pass.
        inplace: write the gradient over the logits, whose values are lost, so no other code may read them.
            Implies `grad_in_forward`. If no gradient is needed the logits stay as they are.

    Returns the loss, float32 (float64 for float64): a scalar, or [...] for "none".
    Raises ValueError, TypeError or IndexError for shapes, dtypes, options and (on a CPU) targets that do not
    fit.
    """
    if not inplace and not is_dynamo_compiling():
        loss = direct.cross_entropy(
            logits,
            target,
            weight,
            ignore_index,
            label_smoothing,
            reduction,
            soft_cap,
            z_loss,
            vocab_size,
            grad_in_forward,
        )
        if loss is not None:
            return loss
    device = logits.device.type
    options: dict[str, Any] = {}  # only the options in use: parsing each one takes time
    if weight is not None:
        options["weight"] = weight
    if ignore_index != -100:
        options["ignore_index"] = ignore_index
    if label_smoothing != 0.0:
        options["label_smoothing"] = label_smoothing
    if reduction != "mean":
        options["reduction"] = reduction
    if soft_cap is not None:
        options["soft_cap"] = soft_cap
    if z_loss != 0.0:
        options["z_loss"] = z_loss
    if vocab_size is not None:
        options["vocab_size"] = vocab_size
    if not native.ready(device) or (device == "cuda" and logits.dtype is torch.float64):
        return reference(logits, target, **options)
    if inplace and torch.is_grad_enabled() and logits.requires_grad:
        return torch.ops.fuseline.cross_entropy_.default(logits, target, **options)
    if grad_in_forward or inplace:
        options["grad_in_forward"] = True
    return torch.ops.fuseline.cross_entropy.default(logits, target, **options)


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    options = {"reduction": "none", **case.options}
    draw: dict[str, Any] = {"generator": generator, "device": device}
    vocab_size = options.get("vocab_size") or case.shape[-1]
    logits = torch.randn(case.shape, dtype=torch.float32, **draw) * options.pop("spread", 2.0)
    target = torch.randint(vocab_size, case.shape[:-1], **draw)
    ignored = torch.rand(case.shape[:-1], **draw) < options.pop("ignored", 0.2 if case.options else 0.0)
    target = target.masked_fill(ignored, options.get("ignore_index", -100))
    if options.pop("int32", False):
        target = target.int()
    if options.pop("weighted", False):
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        options["weight"] = (torch.rand(vocab_size, **draw) + 0.5).to(kind)
    return {"logits": logits.to(dtype), "target": target, **options}


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    return math.prod(case.shape) * itemsize * (1 if direction == "fw" else 2)


def _flops(case: Case, direction: str) -> int:
    return math.prod(case.shape) * (4 if direction == "fw" else 3)


def _sweep(rows: int, n: int) -> Case:
    return Case(f"{rows}x{n}", (rows, n), {"reduction": "mean", "grad_in_forward": True, "ignored": 0.0})


VOCABULARIES = (32000, 50257, 50304, 65536, 128256, 131072, 262144)

CROSS_ENTROPY = register(
    Op(
        name="cross_entropy",
        function=cross_entropy,
        reference=reference,
        inputs=_inputs,
        differentiable=("logits",),
        cases=(
            Case("rows of 128", (64, 128)),
            Case("one class", (5, 1), {"reduction": "sum"}),
            Case("odd rows", (31, 31), {"reduction": "mean"}),
            Case("a thousand classes", (9, 1000), {"reduction": "sum"}),
            Case("1023 classes", (5, 1023), {"reduction": "mean"}),
            Case("a vocabulary", (3, 50257), {"reduction": "mean", "ignored": 0.0}),
            Case("a large vocabulary", (2, 131075), {"reduction": "sum", "ignored": 0.0}),
            Case("longer than a cluster holds", (1, 300001), {"reduction": "sum", "ignored": 0.0}),
            Case("one row", (65,), {"ignored": 0.0}),
            Case("no rows", (0, 16), {"reduction": "sum"}),
            Case("nothing to learn", (4, 9), {"reduction": "sum", "ignored": 1.0}),
            Case("int32 targets", (9, 100), {"reduction": "mean", "int32": True, "ignore_index": -1}),
            Case("smoothed", (33, 200), {"reduction": "mean", "label_smoothing": 0.1}),
            Case("weighted batch of rows", (2, 9, 40), {"reduction": "mean", "weighted": True}),
            Case("capped", (17, 90), {"reduction": "mean", "soft_cap": 5.0}),
            Case("z-loss", (17, 90), {"reduction": "mean", "z_loss": 1e-2}),
            Case("padded vocabulary", (9, 128), {"reduction": "mean", "vocab_size": 97}),
            Case("padded vocabulary, long", (2, 50304), {"vocab_size": 50257, "soft_cap": 30.0}),
            Case(
                "all at once",
                (9, 1100),
                {
                    "reduction": "mean",
                    "weighted": True,
                    "label_smoothing": 0.1,
                    "soft_cap": 4.0,
                    "z_loss": 1e-3,
                    "vocab_size": 1037,
                },
            ),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
        sweep=_sweep,
        lengths=VOCABULARIES,
    )
)
