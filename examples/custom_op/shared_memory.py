"""What shared memory gains: nothing where a thread reads back its own value (ReLU), much where it needs
another thread's (a transposition).

    python examples/custom_op/shared_memory.py

Without a GPU or nvcc the operators are torch's own, and nothing is timed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from relu import load_operators as load_relu

from fuseline import native
from fuseline.timing import time_calls

HERE = Path(__file__).parent
SIDE = 4096  # 64 MiB of floats, more than the L2 of an H100 or H200


def load_operators() -> Any:
    """`torch.ops.shared_example`, compiled at the first call; with the kernels where they can run."""
    cuda = torch.cuda.is_available() and native.compilers()["nvcc"].compiler is not None
    return native.build_extension(
        "shared_example",
        cpp_sources=[HERE / "shared_memory.cpp"],
        cuda_sources=[HERE / "shared_memory.cu"] if cuda else [],
    )


def main() -> None:
    ops, plain = load_operators(), load_relu()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(SIDE, SIDE, device=device)
    ways = {
        "ReLU": lambda: plain.relu(x.flatten()),
        "ReLU through shared memory": lambda: ops.relu(x.flatten()),
        "transposition": lambda: ops.transpose(x, False),
        "transposition through shared memory": lambda: ops.transpose(x, True),
    }
    wanted = [torch.relu(x.flatten())] * 2 + [x.t()] * 2
    for (name, way), true in zip(ways.items(), wanted, strict=True):
        if not torch.equal(way(), true):
            raise SystemExit(f"{name} is wrong.")
    if device.type != "cuda":
        print("All four are right. There is no CUDA device to time them on.")
        return
    for name, way in ways.items():
        us = time_calls(way, device).median
        print(f"{name:<38}{us:8.1f} us, {2 * x.nbytes / us / 1e3:,.0f} GB/s")


if __name__ == "__main__":
    main()
