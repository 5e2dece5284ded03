"""Which kernels take which rows on an H200, asked of the plans that the launchers obey."""

from __future__ import annotations

from typing import Any

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


ATTENTIONS: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("64 sequences of 64", (64, 12, 64, 64), {}),
    ("64 of 128", (64, 12, 128, 64), {}),
    ("64 of 128, 4 heads of keys", (64, 12, 128, 64), {"kv_heads": 4}),
    ("64 of up to 128, packed", (64, 12, 128, 64), {"sequences": True}),
    ("8 of 1,024", (8, 12, 1024, 64), {"causal": True}),
    ("the same, dropout", (8, 12, 1024, 64), {"causal": True, "dropout": 0.1}),
    ("the same, a window or a mask", (8, 12, 1024, 64), {"window": 256}),
    ("the same, a trained bias", (8, 12, 1024, 64), {"bias": True}),
    ("8 of 1,024, heads of 32", (8, 12, 1024, 32), {"causal": True}),
    ("heads of 128", (8, 12, 1024, 128), {"causal": True}),
    ("heads of 256", (8, 12, 1024, 256), {"causal": True}),
    ("1 query over 8,192 keys", (8, 32, 1, 128), {"keys": 8192}),
)


def attention() -> list[str]:
    """Our kernels of attention by problem, in bf16 where there are products of warpgroups and where not."""
    body = []
    for name, shape, options in ATTENTIONS:
        cells = []
        for gpu in (GPU, "a100"):
            plans = explain("attention", shape, gpu=gpu, **options).plans
            for work in ("forward", "backward"):
                kernels = [plan.kernel.removeprefix("attention_") for plan in plans if plan.work == work]
                cells.append(", ".join(dict.fromkeys(k for k in kernels if k != "delta")))
        body.append([name, *cells])
    head = [
        "heads of 64 unless said",
        *(f"{gpu}, {work}" for gpu in ("H200", "A100") for work in ("forward", "backward")),
    ]
    said = "Most names begin with `attention_`; `delta` goes before each backward but `short`."
    return [*table(head, body, left=5), "", f"{said} In bf16."]


def small_layers() -> list[str]:
    """Kernels of small self-attention layers forward by problem, eager and in a CUDA graph."""
    body = []
    arithmetics = (torch.bfloat16, {}), (torch.float32, {"tf32": True}), (torch.float32, {})
    for batch, tokens, width, heads in (
        (8, 10, 64, 4),
        (8, 16, 512, 8),
        (8, 64, 256, 4),
        (8, 128, 512, 8),
        (32, 128, 512, 8),
    ):
        cells = []
        for dtype, options in arithmetics:
            for captured in (False, True):
                asked = {**options, "heads": heads, "captured": captured}
                plans = explain("self_attention_layer", (batch, tokens, width), dtype, gpu=GPU, **asked).plans
                kernels = [plan.kernel for plan in plans if plan.work == "forward"]
                cells.append(", ".join(kernel.removeprefix("small_layer_") for kernel in kernels) or "none")
        body.append([f"{batch} x {tokens} x {width}, {heads} heads", *cells])
    kinds = [f"{name}, {how}" for name in ("bf16", "TF32", "fp32") for how in ("eager", "graph")]
    said = "Kernels are `small_layer_...`, forward, on an H200."
    return [*table(["batch x tokens x width", *kinds], body, left=7), "", said]


def optimizer() -> list[str]:
    """Launches of a step of AdamW and of the norm of gradients, and their blocks, by number and shape of the
    parameters."""
    body = []
    for tensors, shape in ((16, (256, 256)), (148, (768, 768)), (148, (2048, 2048)), (1000, (1024, 4096))):
        cells = []
        for op, dtype, gpu in (
            ("adamw", torch.bfloat16, GPU),
            ("adamw", torch.float32, GPU),
            ("gradient_norm", torch.bfloat16, GPU),
            ("gradient_norm", torch.bfloat16, "a100"),
        ):
            plans = explain(op, shape, dtype, gpu=gpu, tensors=tensors).plans
            cells.append(" + ".join(f"{plan.blocks:,}" for plan in plans))
        body.append([f"{tensors:,} of {shape[0]:,} x {shape[1]:,}", *cells])
    kinds = ("`adamw`, bf16", "`adamw`, fp32", "`gradient_norm`, bf16, H200", "`gradient_norm`, bf16, A100")
    return [*table(["parameters", *kinds], body), "", "Blocks of 256 threads, launch by launch."]


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
