"""Which kernels take which rows on an H200, asked of the plans that the launchers obey."""

from __future__ import annotations

import torch

from fuseline.ops.plans import explain
from tables.markdown import table

GPU = "h200"
LENGTHS = (64, 197, 512, 768, 1000, 1024, 4096, 8192, 16384, 32768, 50257, 65536, 131072, 262144, 1048576)
FEW_ROWS = 64
MANY_ELEMENTS = 1 << 29


def softmax() -> list[str]:
    """Kernels of softmax by the length of a row."""
    return _by_length("softmax", "softmax_", ("forward", "backward"))


def cross_entropy() -> list[str]:
    """Kernels of the loss by the number of classes."""
    return _by_length("cross_entropy", "cross_entropy_", ("loss and gradient", "loss alone"))


def norms() -> list[str]:
    """Kernels of the norms by their width: of x alone, of a sum, and of a sum of a 16-bit branch and its fp32
    stream."""
    ops = ("layer_norm", {}), ("add_layer_norm", {}), ("add_layer_norm", {"fp32_stream": True})
    body = []
    for length in (31, 128, 384, 768, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 65536, 131072):
        cells = []
        for op, options in ops:
            for rows in (FEW_ROWS, MANY_ELEMENTS // length):
                plans = explain(op, (rows, length), gpu=GPU, **options).plans
                cells.append(", ".join(dict.fromkeys(_short(plan.kernel, "norm_") for plan in plans)))
        body.append([f"{length:,}", *cells])
    kinds = ("x", "sum", "sum, fp32 stream")
    head = ["N", *(f"{kind}, {rows} rows" for kind in kinds for rows in (FEW_ROWS, "many"))]
    said = "Kernels are `norm_forward_...` and `norm_backward_...`, in this order where they differ."
    return [*table(head, body, left=7), "", f"{said} In bf16 on an H200; many rows are 2^29 elements."]


def _by_length(op: str, prefix: str, works: tuple[str, ...]) -> list[str]:
    body = []
    for length in LENGTHS:
        cells = []
        for dtype in (torch.bfloat16, torch.float32):
            for rows in (FEW_ROWS, MANY_ELEMENTS // length):
                plans = explain(op, (rows, length), dtype, gpu=GPU).plans
                cells.append(", ".join(dict.fromkeys(_short(plan.kernel, prefix) for plan in plans)))
        body.append([f"{length:,}", *cells])
    head = ["N", "bf16, 64 rows", "bf16, many rows", "fp32, 64 rows", "fp32, many rows"]
    said = f"Kernels are `{prefix}...`; where {' and '.join(works)} differ, both stand in this order."
    return [*table(head, body, left=5), "", f"{said} On an H200; many rows are 2^29 elements."]


def _short(kernel: str, prefix: str) -> str:
    return kernel.removeprefix(prefix).removeprefix("forward_").removeprefix("backward_")
