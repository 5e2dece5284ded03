"""The precisions a step may compute in: fp32, TF32, bf16, fp16, fp8.

fp8 is bf16, except for the products of linear layers (`acceleration.fp8`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fuseline.errors import InputError, unknown_name
from fuseline.ops.fp8_rows import why_no_fp8

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of the inputs of matrix products and attention."""
    return _AUTOCAST.get(precision, torch.float32)


def check_precision(precision: str, device: torch.device, *, train: bool = True) -> None:
    """Raise `InputError` if the precision does not exist, or not on `device`, or, without `train`, if it is
    for training only."""
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    if precision == "tf32" and device.type != "cuda":
        raise InputError(f"tf32 is a tensor-core format of CUDA GPUs; on {device.type} take fp32 or bf16.")
    if precision == "fp8" and not train:
        raise InputError(
            "Precision fp8 is that of training steps. Take bf16, or quantize the weights: "
            "fuseline.quantize(model, 'fp8')."
        )
    if precision == "fp8" and (why := why_no_fp8(device)):
        raise InputError(
            f"Precision fp8 does not run here: {why}. Take bf16: fp8 is that but for linear layers' products."
        )


@contextlib.contextmanager
def matmul_format(precision: str) -> Iterator[None]:
    """Compute fp32 products in full for `fp32`, and in TF32 for all other precisions: TF32 has a mantissa no
    shorter than the 16-bit formats, and autocast leaves some products in fp32 (those of torch's math
    attention). On exit the process's own setting comes back.

    torch keeps this in process-wide flags (one for matrix products, one for cuDNN), so it is set around each
    step rather than once: two steps of different precision can then alternate in one process.
    """
    reduced = precision != "fp32"
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if reduced else "highest")
    torch.backends.cudnn.allow_tf32 = reduced
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context a forward pass runs in: autocast for bf16, fp16 and fp8, none for fp32 and TF32."""
    if precision in _AUTOCAST:
        return torch.autocast(device.type, dtype=_AUTOCAST[precision])
    return contextlib.nullcontext()


def make_scaler(
    precision: str, device: torch.device, optimizer: torch.optim.Optimizer
) -> torch.amp.GradScaler | None:
    """A gradient scaler for fp16, None for the rest.

    Raises:
        InputError: the optimizer is not fused. Only a fused one reads on the device whether a gradient
            overflowed; any other makes the scaler ask, which stops the host each step.
    """
    if precision != "fp16":
        return None
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise InputError(
            "fp16 needs a fused optimizer: skipping a step whose gradients overflowed would otherwise "
            "synchronize each step. Make it with fused=True."
        )
    return torch.amp.GradScaler(device.type)
