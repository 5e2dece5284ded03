"""Softmax and LayerNorm on CuPy arrays, on a CuPy stream.

python examples/without_torch/with_cupy.py
"""

from __future__ import annotations

import sys

import cupy
from kernels import Kernels, find_library

ROWS, N = 4096, 1024
EPS = 1e-5


def main() -> None:
    kernels = Kernels(find_library())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.random.standard_normal((ROWS, N), dtype=cupy.float32)
        weight, bias = (cupy.random.standard_normal(N, dtype=cupy.float32) for _ in range(2))
        probabilities, normalized = cupy.empty_like(x), cupy.empty_like(x)
        kernels.softmax(x.data.ptr, probabilities.data.ptr, ROWS, N, stream.ptr)
        pointers = (array.data.ptr for array in (x, weight, bias, normalized))
        kernels.layer_norm(*pointers, ROWS, N, stream.ptr, EPS)

        wide = x.astype(cupy.float64)
        exponentials = cupy.exp(wide - wide.max(1, keepdims=True))
        centred = wide - wide.mean(1, keepdims=True)
        rstd = 1 / cupy.sqrt((centred**2).mean(1, keepdims=True) + EPS)
        wanted = exponentials / exponentials.sum(1, keepdims=True), centred * rstd * weight + bias
        names = "softmax", "layer_norm"
        for name, found, expected in zip(names, (probabilities, normalized), wanted, strict=True):
            error = float(cupy.linalg.norm(found - expected) / cupy.linalg.norm(expected))
            print(f"{name} of {ROWS} x {N} on a CuPy stream: relative error {error:.1e}")
            if not error < 1e-6:
                raise SystemExit(f"{name} is wrong.")
    print("torch in this process:", "torch" in sys.modules)


if __name__ == "__main__":
    main()
