"""The C API of the linear layers' kernels (csrc/kernels/fuseline_quant.h) through ctypes.

Nothing is checked and nothing differentiated here; the op is `fuseline.ops.quant_linear`.
"""

from __future__ import annotations

import ctypes

import torch

from fuseline.native.kernels import DTYPES, Kernels, address
from fuseline.native.library import NativeError

WEIGHT_FORMATS = {"plain": 0, "int8": 1, "int4": 2}
LINEAR_KERNELS = {"any": 0, "stream": 1, "tiles": 2, "gemv": 3, "65_to_256": 4, "slices": 5}


class _Call(ctypes.Structure):
    """`fuseline_linear`, field by field."""

    _fields_ = (
        ("format", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("kernel", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("norm", ctypes.c_int),
        ("norm_weight", ctypes.c_void_p),
        ("norm_bias", ctypes.c_void_p),
        ("eps", ctypes.c_double),
        ("activation", ctypes.c_int),
        ("residual", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("overlap", ctypes.c_int),
        ("next_weight", ctypes.c_void_p),
        ("next_bytes", ctypes.c_int64),
    )


def launch_quant_linear(
    kernels: Kernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *,
    format: str,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    group_size: int = 0,
    kernel: str = "any",
    splits: int = 0,
) -> None:
    """y [M, N] = x [M, K] W^T + bias on the current stream, x's rows any distance apart.

    `kernel` and `splits`, where given, are what is to be taken; `NativeError` if it cannot be.
    """
    size = kernels.library.fuseline_quant_linear_workspace
    size.argtypes, size.restype = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64], ctypes.c_int64
    room = size(WEIGHT_FORMATS[format], *x.shape)
    workspace = torch.empty(room, dtype=torch.uint8, device=x.device) if x.shape[0] > 8 else None
    call = _Call(
        format=WEIGHT_FORMATS[format],
        dtype=DTYPES[x.dtype],
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        scales=address(scales),
        zeros=address(zeros),
        bias=address(bias),
        y=y.data_ptr(),
        m=x.shape[0],
        n=y.shape[1],
        k=x.shape[1],
        x_stride=x.stride(0),
        weight_stride=x.shape[1],
        group_size=group_size,
        kernel=LINEAR_KERNELS[kernel],
        splits=splits,
        workspace=address(workspace),
    )
    function = kernels.library.fuseline_quant_linear
    function.argtypes, function.restype = [ctypes.POINTER(_Call), ctypes.c_void_p], ctypes.c_int
    code = function(ctypes.byref(call), torch.cuda.current_stream(x.device).cuda_stream)
    if code:
        words = kernels.library.fuseline_error_string(code).decode()
        raise NativeError(f"The kernel library answered {code}: {words}.")
