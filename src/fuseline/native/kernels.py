"""The kernels' C API (csrc/kernels/fuseline_kernels.h) through ctypes, with no torch library in between.

For measuring and testing kernels alone, and an example for callers in other frameworks. Tensors are only
memory here: contiguous rows on one device, nothing is checked, nothing is differentiated. The ops stand in
`fuseline.ops`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline.native.layouts import ROW_KERNELS, Layout
from fuseline.native.library import NativeError, load, status

ABI_VERSION = 7
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NORMS = (
    "layer_norm",
    "rms_norm",
    "add_layer_norm",
    "add_rms_norm",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
)
FAMILIES = (
    "softmax_forward",
    "softmax_backward",
    "cross_entropy",
    "layer_norm_forward",
    "layer_norm_backward",
    *(f"many_{norm}_{direction}" for norm in NORMS for direction in ("forward", "backward")),
)
"""Kernels with a table of layouts (csrc/kernels/rows/table_h100.h), in the order of the header's numbers."""
MASK_NONE, MASK_BOOL, MASK_ADD, MASK_ADD_FP32 = range(4)

_POINTER, _SIZE, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_STRIDES = ctypes.POINTER(ctypes.c_int64)
_SIGNATURES: dict[str, tuple[list[type], type]] = {
    "fuseline_kernels_abi_version": ([], _INT),
    "fuseline_error_string": ([_INT], ctypes.c_char_p),
    "fuseline_plan_override": ([_INT] * 6, _INT),
    "fuseline_layer_norm_forward": (
        [*[_POINTER] * 6, _SIZE, _SIZE, _DOUBLE, _INT, _INT, _POINTER],
        _INT,
    ),
    "fuseline_layer_norm_backward_workspace": ([_SIZE, _SIZE, _INT], ctypes.c_size_t),
    "fuseline_layer_norm_backward": ([*[_POINTER] * 9, _SIZE, _SIZE, _INT, _INT, _POINTER], _INT),
    "fuseline_softmax_forward": (
        [_POINTER, _POINTER, _INT, _STRIDES, *[_SIZE] * 4, _DOUBLE, _INT, _POINTER, _INT, _POINTER],
        _INT,
    ),
    "fuseline_cross_entropy_forward": (
        [
            *(_POINTER, _POINTER, _INT, *[_POINTER] * 3, _INT, *[_POINTER] * 3),
            *(*[_SIZE] * 4, *[_DOUBLE] * 3, _INT, _POINTER),
        ],
        _INT,
    ),
    "fuseline_softmax_backward": ([*[_POINTER] * 3, _SIZE, _SIZE, _DOUBLE, _INT, _POINTER], _INT),
}


@dataclass(frozen=True)
class Kernels:
    """The launch functions over tensors of shape [rows, N]. A failed launch raises `NativeError`."""

    library: ctypes.CDLL

    def layer_norm_forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        y: torch.Tensor,
        mean: torch.Tensor | None,
        rstd: torch.Tensor | None,
        eps: float = 1e-5,
    ) -> None:
        pointers = map(address, (x, weight, bias, y, mean, rstd))
        dtypes = DTYPES[x.dtype], _weight_dtype(x, weight, bias)
        self._check(self.library.fuseline_layer_norm_forward(*pointers, *x.shape, eps, *dtypes, _stream(x)))

    def layer_norm_backward_workspace(self, x: torch.Tensor) -> torch.Tensor:
        """Scratch for `layer_norm_backward` over rows like these."""
        size = self.library.fuseline_layer_norm_backward_workspace(*x.shape, DTYPES[x.dtype])
        return torch.empty(size // 4, dtype=torch.float32, device=x.device)

    def layer_norm_backward(
        self,
        grad_out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        grad_x: torch.Tensor | None,
        grad_weight: torch.Tensor | None,
        grad_bias: torch.Tensor | None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        if workspace is None:
            workspace = self.layer_norm_backward_workspace(x)
        pointers = map(address, (grad_out, x, weight, mean, rstd, grad_x, grad_weight, grad_bias, workspace))
        dtypes = DTYPES[x.dtype], _weight_dtype(x, weight, grad_weight, grad_bias)
        self._check(self.library.fuseline_layer_norm_backward(*pointers, *x.shape, *dtypes, _stream(x)))

    def softmax_forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        shape: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        scale: float = 1.0,
        causal: bool = False,
    ) -> None:
        """`shape` is [B, H, T, S], of which x is the rows ([1, 1, rows, N]); mask broadcasts to it."""
        sizes = (1, 1, *x.shape) if shape is None else tuple(shape)
        kind = MASK_NONE
        strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            kind = MASK_ADD if mask.dtype == x.dtype else MASK_ADD_FP32
            kind = MASK_BOOL if mask.dtype == torch.bool else kind
            strides = mask.expand(sizes).stride()
        masking = address(mask), kind, (ctypes.c_int64 * 4)(*strides)
        output = int(causal), address(y), DTYPES[x.dtype], _stream(x)
        self._check(self.library.fuseline_softmax_forward(address(x), *masking, *sizes, scale, *output))

    def softmax_backward(
        self, grad_out: torch.Tensor, y: torch.Tensor, grad_x: torch.Tensor, scale: float = 1.0
    ) -> None:
        pointers = map(address, (grad_out, y, grad_x))
        self._check(
            self.library.fuseline_softmax_backward(*pointers, *y.shape, scale, DTYPES[y.dtype], _stream(y))
        )

    def cross_entropy_forward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        loss: torch.Tensor,
        statistics: torch.Tensor,
        grad: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        soft_cap: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        """The loss of each row and, if `grad` is given (it may be the logits), the gradient of their sum."""
        rows, n = logits.shape
        pointers = address(logits), address(target), target.element_size(), None, None, None, 0
        results = map(address, (loss, statistics, grad))
        options = ignore_index, label_smoothing, soft_cap, z_loss, DTYPES[logits.dtype], _stream(logits)
        self._check(self.library.fuseline_cross_entropy_forward(*pointers, *results, rows, n, n, *options))

    def override_plan(self, family: str, layout: Layout | None) -> None:
        """Lay out a family's kernels (of `FAMILIES`) so in calls of this thread; None: by the table."""
        numbers = (0, 0, 0, 0, 0)
        if layout is not None:
            numbers = (
                layout.held,
                layout.block,
                layout.cluster,
                layout.stages,
                ROW_KERNELS.index(layout.kernel),
            )
        self._check(self.library.fuseline_plan_override(FAMILIES.index(family), *numbers))

    def _check(self, code: int) -> None:
        if code:
            words = self.library.fuseline_error_string(code).decode()
            raise NativeError(f"The kernel library answered {code}: {words}.")


def open_kernels() -> Kernels:
    """The library named in $FUSELINE_KERNELS_LIBRARY, or the one that `fuseline.native` builds and loads.

    Raises `NativeError` where there is none, or where it is of another version.
    """
    library = ctypes.CDLL(str(_library_path()))
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    version = library.fuseline_kernels_abi_version()
    if version != ABI_VERSION:
        raise NativeError(
            f"The kernel library has ABI version {version}, not {ABI_VERSION}. Run `fuseline build`."
        )
    return Kernels(library)


def _library_path() -> Path:
    if named := os.environ.get("FUSELINE_KERNELS_LIBRARY"):
        return Path(named)
    load()
    kernels = status().kernels
    if not kernels.loaded or kernels.path is None:
        raise NativeError(f"The kernel library is not loaded: {kernels.reason} {kernels.mend}".rstrip())
    return kernels.path


def address(tensor: torch.Tensor | None) -> int | None:
    """Where it stands, as the C API takes it."""
    return None if tensor is None else tensor.data_ptr()


def _stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def _weight_dtype(x: torch.Tensor, *weights: torch.Tensor | None) -> int:
    return DTYPES[next((weight.dtype for weight in weights if weight is not None), x.dtype)]
