"""Softmax and LayerNorm from plain Python: memory and a stream by the driver, the rest by the library.

python examples/without_torch/with_ctypes.py
"""

from __future__ import annotations

import math
import random
import sys

from driver import Driver
from kernels import Kernels, find_library

ROWS, N = 64, 1000
EPS = 1e-5


def main() -> None:
    gpu = Driver()
    kernels = Kernels(find_library())
    stream = gpu.stream()
    draw = random.Random(0)
    rows = [[draw.gauss(0, 1) for _ in range(N)] for _ in range(ROWS)]
    weight, bias = ([draw.gauss(1, 0.5) for _ in range(N)] for _ in range(2))

    x = gpu.to_device([value for row in rows for value in row], stream)
    w, b = gpu.to_device(weight, stream), gpu.to_device(bias, stream)
    probabilities, normalized = gpu.empty(ROWS * N), gpu.empty(ROWS * N)
    kernels.softmax(x, probabilities, ROWS, N, stream)
    kernels.layer_norm(x, w, b, normalized, ROWS, N, stream, EPS)

    wanted = [softmax(row) for row in rows], [layer_norm(row, weight, bias) for row in rows]
    for name, address, expected in zip(
        ("softmax", "layer_norm"), (probabilities, normalized), wanted, strict=True
    ):
        found = gpu.to_host(address, ROWS * N, stream)
        error = distance(found, [value for row in expected for value in row])
        print(f"{name} of {ROWS} x {N} on a stream of its own: relative error {error:.1e}")
        if not error < 1e-6:
            raise SystemExit(f"{name} is wrong.")
    gpu.free(x, w, b, probabilities, normalized)
    print("torch in this process:", "torch" in sys.modules)


def softmax(row: list[float]) -> list[float]:
    largest = max(row)
    exponentials = [math.exp(value - largest) for value in row]
    total = sum(exponentials)
    return [value / total for value in exponentials]


def layer_norm(row: list[float], weight: list[float], bias: list[float]) -> list[float]:
    mean = sum(row) / len(row)
    rstd = 1 / math.sqrt(sum((value - mean) ** 2 for value in row) / len(row) + EPS)
    return [(v - mean) * rstd * w + b for v, w, b in zip(row, weight, bias, strict=True)]


def distance(found: list[float], wanted: list[float]) -> float:
    """norm(found - wanted) / norm(wanted)."""
    return math.dist(found, wanted) / math.hypot(*wanted)


if __name__ == "__main__":
    main()
