"""The kernel library through ctypes: softmax and LayerNorm for anyone who holds device pointers. No torch.

The signatures are those of src/fuseline/csrc/kernels/fuseline_kernels.h, which says what each argument means.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

ABI_VERSION = 7
FLOAT32 = 0
NO_MASK = 0

POINTER, SIZE, INT, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
STRIDES = ctypes.POINTER(ctypes.c_int64)
SIGNATURES: dict[str, tuple[list[type], type]] = {
    "fuseline_kernels_abi_version": ([], INT),
    "fuseline_error_string": ([INT], ctypes.c_char_p),
    # x, weight, bias, y, mean, rstd; rows, n, eps, dtype, weight_dtype, stream
    "fuseline_layer_norm_forward": ([*[POINTER] * 6, SIZE, SIZE, DOUBLE, INT, INT, POINTER], INT),
    # x, mask, mask_kind, mask_strides; B, H, T, S, scale, causal, y, dtype, stream
    "fuseline_softmax_forward": (
        [POINTER, POINTER, INT, STRIDES, *[SIZE] * 4, DOUBLE, INT, POINTER, INT, POINTER],
        INT,
    ),
}


class Kernels:
    """The functions above; an answer other than 0 raises RuntimeError with the library's words."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = arguments, result
        version = self.library.fuseline_kernels_abi_version()
        if version != ABI_VERSION:
            raise RuntimeError(f"{path} speaks version {version} of the interface, not {ABI_VERSION}.")

    def softmax(self, x: int, y: int, rows: int, n: int, stream: int, scale: float = 1.0) -> None:
        """y = softmax(scale * x) for each of `rows` rows of `n` fp32; x and y are device addresses."""
        self._check(
            self.library.fuseline_softmax_forward(
                x, None, NO_MASK, None, 1, 1, rows, n, scale, 0, y, FLOAT32, stream
            )
        )

    def layer_norm(
        self, x: int, weight: int, bias: int, y: int, rows: int, n: int, stream: int, eps: float = 1e-5
    ) -> None:
        """y = (x - mean) * rstd * weight + bias for each of `rows` rows of `n` fp32."""
        self._check(
            self.library.fuseline_layer_norm_forward(
                x, weight, bias, y, None, None, rows, n, eps, FLOAT32, FLOAT32, stream
            )
        )

    def _check(self, code: int) -> None:
        if code:
            words = self.library.fuseline_error_string(code).decode()
            raise RuntimeError(f"The kernel library answered {code}: {words}.")


def find_library() -> str:
    """$FUSELINE_KERNELS_LIBRARY, or what `fuseline build --kernels-only` builds or built: in a process of its
    own, for Fuseline's Python part stands on torch."""
    if named := os.environ.get("FUSELINE_KERNELS_LIBRARY"):
        return named
    command = [sys.executable, "-m", "fuseline", "build", "--kernels-only", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"There is no kernel library, and it cannot be built: {done.stderr.strip()}")
    return str(json.loads(done.stdout)["fuseline_kernels"])
