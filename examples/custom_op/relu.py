"""The smallest operator of one's own: ReLU in C++ and CUDA, in a model, under torch.compile.

python examples/custom_op/relu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fuseline import native

HERE = Path(__file__).parent


def load_operators() -> Any:
    """`torch.ops.relu_example`, compiled at the first call; without CUDA where there is no GPU or no nvcc."""
    cuda = torch.cuda.is_available() and native.compilers()["nvcc"].compiler is not None
    return native.build_extension(
        "relu_example", cpp_sources=[HERE / "relu.cpp"], cuda_sources=[HERE / "relu.cu"] if cuda else []
    )


class ReLU(torch.nn.Module):
    """torch.nn.ReLU over the operator above."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = load_operators()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.relu_example.relu(x)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), ReLU(), torch.nn.Linear(128, 1)).to(device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        x = torch.randn(32 + step, 64, device=device)  # a new shape each step, one graph for all
        loss = (compiled(x) - x.sum(1, keepdim=True).sign()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"ReLU on {device}: loss {loss.item():.3f} after 50 steps, compiled into one graph")


if __name__ == "__main__":
    main()
