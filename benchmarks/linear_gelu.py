"""Times the linear layer and GELU of a transformer's MLP, fused in different places, forward and both ways.

    python benchmarks/linear_gelu.py

Shapes are GPT-2's (16,384 tokens, 768 to 3,072, bf16). `linear+bias, gelu` adds the bias in the product's
epilogue and runs our gelu; `linear, bias+gelu` leaves the bias to our gelu, whose backward sums its gradient
up in the same pass; `_addmm_activation` is cuBLASLt's own epilogue, forward only, since it keeps nothing for
a backward; `inductor` is torch.compile of the plain two. Each is timed with the L2 overwritten before every
run, the variants in turn, and the median over the rounds is printed in microseconds.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro

from fuseline import ops
from fuseline.timing import time_calls

Variant = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Options:
    """What to time."""

    tokens: int = 16384
    width: int = 768
    inner: int = 3072
    rounds: int = 5
    repeats: int = 20


def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def bias_in_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return ops.gelu(F.linear(x, weight, bias))


def bias_in_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return ops.gelu(F.linear(x, weight), bias)


def gelu_in_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)


def in_turn(
    calls: dict[str, Callable[[], object]], options: Options, device: torch.device
) -> dict[str, float]:
    """The median microseconds of each call over rounds that go forwards and backwards."""
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(options.rounds):
        for name in calls if number % 2 == 0 else reversed(list(calls)):
            seen[name].append(time_calls(calls[name], device, repeats=options.repeats).median)
    return {name: statistics.median(times) for name, times in seen.items()}


def main(options: Options) -> int:
    if not torch.cuda.is_available():
        print("This times CUDA kernels, and torch sees no CUDA device.", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    draw = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    x = draw(options.tokens, options.width).requires_grad_()
    weight = (draw(options.inner, options.width) * options.width**-0.5).requires_grad_()
    bias = draw(options.inner).requires_grad_()
    grad_out = draw(options.tokens, options.inner)
    variants: dict[str, Variant] = {
        "linear+bias, gelu": bias_in_product,
        "linear, bias+gelu": bias_in_gelu,
        "eager": eager,
        "inductor": torch.compile(eager, dynamic=False),
    }

    def forward(variant: Variant) -> torch.Tensor:
        with torch.no_grad():
            return variant(x, weight, bias)

    def both(variant: Variant) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(variant(x, weight, bias), (x, weight, bias), grad_out)

    exact = forward(lambda *inputs: eager(*(tensor.float() for tensor in inputs)))
    for name, variant in {**variants, "_addmm_activation": gelu_in_product}.items():
        error = torch.linalg.vector_norm(forward(variant).float() - exact) / torch.linalg.vector_norm(exact)
        print(f"error of {name}: {float(error):.2e}")
    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(forward, variant)
        for name, variant in {**variants, "_addmm_activation": gelu_in_product}.items()
    }
    for name, time_us in in_turn(calls, options, device).items():
        print(f"fw   {name:<20} {time_us:8.1f}")
    calls = {name: functools.partial(both, variant) for name, variant in variants.items()}
    for name, time_us in in_turn(calls, options, device).items():
        print(f"fwbw {name:<20} {time_us:8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
