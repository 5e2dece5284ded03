"""Cross-entropy of a linear head, hidden @ weight^T + bias, without storing all of its logits.

    loss = cross_entropy(hidden @ weight^T + bias, target), as in `fuseline.ops.cross_entropy`

hidden is [..., C], weight [V, C], bias [V], target [...]. dtypes: float32, float16, bfloat16, float64 (on a
GPU float64 runs the reference); weight and bias have hidden's dtype or float32, and are multiplied in
hidden's. Logits exist for `chunk_size` rows at a time, in hidden's dtype. The gradient overwrites them and is
multiplied into the gradients of hidden, weight and bias at once. With more than two chunks the gradients of
weight and bias are added up in float32. The loss is float32 (float64 for float64).

On Hopper, in bfloat16 and without bias, smoothing and cap, the product writes exp(logit), divided by a power
of two that is chosen for each row, in place of the logits. A factor for each row turns these into gradients:
hidden times the factor is rounded to bfloat16 before it is multiplied. If a row's largest logit is more than
126 above the largest of a sample of 192 of its logits, the logits of its chunk are computed twice more.

With reduction "none" the gradients depend on the gradient of each row's loss, so the backward pass computes
the logits again. Not twice differentiable. Source: Hsu et al., "Liger Kernel", 2024, section 3.2 (chunks of
rows, and the gradient in the forward pass).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from fuseline import native
from fuseline.native import direct
from fuseline.ops.cross_entropy import reference as cross_entropy_reference
from fuseline.ops.op import Case, Op, register

CHUNK_ROWS = 4096
CHUNK_BYTES = 2**30
SMALL_CHUNK = 2**26
"""Bytes of logits that save no memory worth a second chunk: a model's hidden rows take as much."""


def chunk_rows(classes: int, dtype: torch.dtype) -> int:
    """How many rows of logits exist at a time, unless the caller says how many.

    It balances two costs: every chunk adds to the weight's gradient, and a chunk's logits take the memory
    that the op is there to save. 8,192 rows of GPT-2's head, forward and backward, on an H100, with a pass
    over the logits: 3.11 ms and 0.85 GiB in one chunk, 3.22 and 0.47 in two, 3.70 and 0.35 in four, 4.41 and
    0.25 in eight; torch.compile of the plain head and loss takes 3.81 ms. Without that pass two chunks take
    2.74. A chunk of 4-byte logits has half the rows (their products are slower, so the sums cost relatively
    no more), and no chunk has more than `CHUNK_BYTES`, which 16-bit vocabularies over 131,072 reach. Under
    8,192 words a chunk has `SMALL_CHUNK` bytes: with the 128 words of characters, 16,384 rows in chunks of
    4,096 took 26 kernels of 2 to 5 us each.
    """
    row = max(1, classes) * dtype.itemsize
    rows = max(min(CHUNK_ROWS * 2 // dtype.itemsize, CHUNK_BYTES // row), SMALL_CHUNK // row)
    return max(128, rows // 128 * 128)


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    class_weight: torch.Tensor | None = None,
    chunk_size: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """The definition in plain PyTorch; it computes all logits at once, whatever `chunk_size` is."""
    logits = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
    return cross_entropy_reference(logits, target, weight=class_weight, **options)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """The loss of the head `weight` [V, C] over hidden [..., C] against the classes in target [...].

    Args:
        hidden: [..., C]; float32, float16, bfloat16 or float64. Under autocast it keeps its dtype, so pass
            it in the dtype to compute in.
        weight: [V, C], of hidden's dtype or float32.
        target: [...], int64 or int32: classes below `vocab_size`, or `ignore_index`.
        bias: [V], of hidden's dtype or float32.
        class_weight: [vocab_size], a factor for each class. Has no gradient.
        ignore_index, label_smoothing, reduction, soft_cap, z_loss, vocab_size: as in
            `fuseline.ops.cross_entropy`.
        chunk_size: the most rows of logits that exist at a time; None for `chunk_rows(V, hidden.dtype)`.

    Returns the loss, float32 (float64 for float64): a scalar, or [...] for "none".
    Raises ValueError, TypeError or IndexError for shapes, dtypes, options and (on a CPU) targets that do not
    fit.
    """
    if not is_dynamo_compiling():
        rows = chunk_rows(weight.shape[0], hidden.dtype) if chunk_size is None else chunk_size
        loss = direct.linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            class_weight,
            ignore_index,
            label_smoothing,
            reduction,
            soft_cap,
            z_loss,
            vocab_size,
            rows,
        )
        if loss is not None:
            return loss
    device = hidden.device.type
    options: dict[str, Any] = {
        "class_weight": class_weight,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
        "soft_cap": soft_cap,
        "z_loss": z_loss,
        "vocab_size": vocab_size,
    }
    if native.ready(device) and not (device == "cuda" and hidden.dtype is torch.float64):
        rows = chunk_rows(weight.shape[0], hidden.dtype) if chunk_size is None else chunk_size
        return torch.ops.fuseline.linear_cross_entropy.default(
            hidden, weight, target, bias, **options, chunk_size=rows
        )
    return reference(hidden, weight, target, bias, **options)


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    """`case.shape` is the shape of the logits."""
    options = {"reduction": "none", **case.options}
    draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
    embed_dim = options.pop("embed_dim", 24)
    classes = case.shape[-1]
    counted = options.get("vocab_size") or classes
    arguments = {
        "hidden": torch.randn(*case.shape[:-1], embed_dim, **draw).to(dtype),
        "weight": (torch.randn(classes, embed_dim, **draw) / math.sqrt(embed_dim)).to(dtype),
    }
    if options.pop("fp32_weights", False) and dtype != torch.float64:
        arguments["weight"] = arguments["weight"].float()
    target = torch.randint(counted, case.shape[:-1], generator=generator, device=device)
    ignored = torch.rand(case.shape[:-1], **draw) < options.pop("ignored", 0.2 if case.options else 0.0)
    arguments["target"] = target.masked_fill(ignored, options.get("ignore_index", -100))
    if options.pop("with_bias", False):
        arguments["bias"] = torch.randn(classes, **draw).to(arguments["weight"].dtype)
    if options.pop("weighted", False):
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        options["class_weight"] = (torch.rand(counted, **draw) + 0.5).to(kind)
    return {**arguments, **options}


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    """hidden and weight, and in the backward their gradients."""
    embed_dim = case.options.get("embed_dim", 24)
    once = (math.prod(case.shape[:-1]) + case.shape[-1]) * embed_dim * itemsize
    return once * (1 if direction == "fw" else 2)


def _flops(case: Case, direction: str) -> int:
    embed_dim = case.options.get("embed_dim", 24)
    return math.prod(case.shape) * embed_dim * (2 if direction == "fw" else 4)


def _sweep(rows: int, n: int) -> Case:
    """The heads of GPT-2 and of Llama 3."""
    embed_dim = 768 if n < 100_000 else 4096
    return Case(f"{rows}x{n}", (rows, n), {"reduction": "mean", "embed_dim": embed_dim, "ignored": 0.0})


LINEAR_CROSS_ENTROPY = register(
    Op(
        name="linear_cross_entropy",
        function=linear_cross_entropy,
        reference=reference,
        inputs=_inputs,
        differentiable=("hidden", "weight", "bias"),
        cases=(
            Case("40 rows of 64", (40, 64)),
            Case("a mean", (33, 65), {"reduction": "mean"}),
            Case("chunks", (300, 50), {"reduction": "mean", "chunk_size": 128, "with_bias": True}),
            Case("chunks of rows' losses", (2, 150, 50), {"chunk_size": 128, "with_bias": True}),
            Case("float32 weights", (40, 64), {"reduction": "sum", "fp32_weights": True, "with_bias": True}),
            Case("no rows", (0, 16), {"reduction": "sum"}),
            Case("one row", (65,), {"ignored": 0.0}),
            Case(
                "all at once",
                (200, 90),
                {
                    "reduction": "mean",
                    "weighted": True,
                    "with_bias": True,
                    "label_smoothing": 0.1,
                    "soft_cap": 4.0,
                    "z_loss": 1e-3,
                    "vocab_size": 83,
                    "chunk_size": 128,
                },
            ),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
        sweep=_sweep,
        lengths=(50304, 128256),
        by_blas=True,
    )
)
