"""cuBLASLt's products with something at their end, by ctypes: which of its epilogues is worth what.

    product = Product(left, right, out, turned_left=False, turned_right=True, epilogue=GELU_AUX_BIAS, ...)
    product.algorithms   # how many the library proposes
    product.run(0)       # the first of them, on the current stream

Matrices are rows as torch has them, of one 16-bit dtype; the library sees their transposes.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

# Epilogues, by the library's numbers. The last sums up what is turned on the left, of a weight's gradient.
NOTHING, GELU_BIAS, GELU_AUX_BIAS, DGELU, DGELU_BGRAD, BGRAD_OF_LEFT = 1, 36, 164, 192, 208, 512

_TRANSPOSED_A, _TRANSPOSED_B, _EPILOGUE, _BIAS, _AUX, _AUX_STEP = 3, 4, 7, 8, 11, 12  # of a product
_MAX_WORKSPACE = 1  # attribute of a preference
_FP32_SUMS, _FP32 = 68, 0
_DTYPES = {torch.float16: 2, torch.bfloat16: 14}
_WORKSPACE_BYTES = 64 * 2**20


class _Proposal(ctypes.Structure):
    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def _library() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """The cuBLASLt that torch has loaded, and a handle."""
    torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")
    maps = Path("/proc/self/maps").read_text().splitlines()
    path = next(line.split(maxsplit=5)[5] for line in maps if "libcublasLt" in line)
    library, handle = ctypes.CDLL(path), ctypes.c_void_p()
    _check(library.cublasLtCreate(ctypes.byref(handle)))
    return library, handle


@functools.cache
def _workspace() -> torch.Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt answered {status}")


def _layout(matrix: torch.Tensor) -> ctypes.c_void_p:
    layout, (rows, columns) = ctypes.c_void_p(), matrix.shape
    create = _library()[0].cublasLtMatrixLayoutCreate
    sizes = ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(matrix.stride(0))
    _check(create(ctypes.byref(layout), _DTYPES[matrix.dtype], *sizes))
    return layout


class Product:
    """out = left right, either turned, and what the epilogue does with it, `bias` and `aux` as it wants."""

    def __init__(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        *,
        turned_left: bool = False,
        turned_right: bool = False,
        epilogue: int = NOTHING,
        bias: torch.Tensor | None = None,
        aux: torch.Tensor | None = None,
        proposals: int = 8,
    ) -> None:
        library, _ = _library()
        self._kept = left, right, out, bias, aux
        self._description = ctypes.c_void_p()
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(self._description), _FP32_SUMS, _FP32))
        self._set(_TRANSPOSED_A, ctypes.c_int32(turned_right))
        self._set(_TRANSPOSED_B, ctypes.c_int32(turned_left))
        self._set(_EPILOGUE, ctypes.c_uint32(epilogue))
        if bias is not None:
            self._set(_BIAS, ctypes.c_void_p(bias.data_ptr()))
        if aux is not None:
            self._set(_AUX, ctypes.c_void_p(aux.data_ptr()))
            self._set(_AUX_STEP, ctypes.c_int64(aux.stride(0)))
        self._layouts = _layout(right), _layout(left), _layout(out)
        self._found = self._propose(proposals)

    def _set(self, attribute: int, value: Any) -> None:
        library, _ = _library()
        given = ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
        _check(library.cublasLtMatmulDescSetAttribute(self._description, attribute, *given))

    def _propose(self, most: int) -> list[_Proposal]:
        library, handle = _library()
        preference, room = ctypes.c_void_p(), ctypes.c_size_t(_WORKSPACE_BYTES)
        _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        size = ctypes.c_size_t(ctypes.sizeof(room))
        _check(
            library.cublasLtMatmulPreferenceSetAttribute(preference, _MAX_WORKSPACE, ctypes.byref(room), size)
        )
        found, count = (_Proposal * most)(), ctypes.c_int(0)
        right, left, out = self._layouts
        problem = handle, self._description, right, left, out, out, preference
        status = library.cublasLtMatmulAlgoGetHeuristic(*problem, most, found, ctypes.byref(count))
        return [] if status else [p for p in list(found)[: count.value] if p.status == 0]

    @property
    def algorithms(self) -> int:
        return len(self._found)

    def run(self, algorithm: int = 0) -> None:
        library, handle = _library()
        left, right, out = (ctypes.c_void_p(tensor.data_ptr()) for tensor in self._kept[:3])
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        right_layout, left_layout, layout = self._layouts
        _check(
            library.cublasLtMatmul(
                *(handle, self._description, ctypes.byref(one), right, right_layout, left, left_layout),
                *(ctypes.byref(zero), out, layout, out, layout),
                ctypes.byref(self._found[algorithm].algorithm),
                ctypes.c_void_p(_workspace().data_ptr()),
                ctypes.c_size_t(_WORKSPACE_BYTES),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
        )
