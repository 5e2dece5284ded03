"""Times a transformer's MLP and the GELU in it, fused in different places, forward and both ways.

    python benchmarks/linear_gelu.py

Shapes are GPT-2's (16,384 tokens, 768 to 3,072 and back, bf16). First the products that GELU and its
gradient stand beside: `linear+bias, gelu` adds the bias in the product's epilogue and runs our gelu; `linear,
bias+gelu` leaves the bias to our gelu, whose backward sums its gradient up in the same pass;
`_addmm_activation` is cuBLASLt's own epilogue, which keeps nothing for a backward; GELU_AUX_BIAS keeps what
it was given, DGELU and DGELU_BGRAD multiply by the gradient, the second summing up the bias's (each algorithm
that is proposed; the tanh form alone). Then the whole MLP: our op, whose kernels have both at the ends of
their products, what it was before, eager, and torch.compile of it. Each is timed with the L2 overwritten
before every run, the variants in turn, and the median over the rounds is printed in microseconds.
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
from cublaslt import DGELU, DGELU_BGRAD, GELU_AUX_BIAS, Product

from fuseline import native, ops
from fuseline.timing import time_calls

Call = Callable[[], object]
Layer = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Options:
    """What to time."""

    tokens: int = 16384
    width: int = 768
    inner: int = 3072
    rounds: int = 5
    repeats: int = 20


@dataclass(frozen=True)
class Inputs:
    """An MLP's: x [tokens, width], weights [inner, width] and [width, inner], biases, and a gradient of y."""

    x: torch.Tensor
    weight_1: torch.Tensor
    bias_1: torch.Tensor
    weight_2: torch.Tensor
    bias_2: torch.Tensor
    grad_out: torch.Tensor

    @classmethod
    def drawn(cls, options: Options, device: torch.device) -> Inputs:
        draw = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        tokens, width, inner = options.tokens, options.width, options.inner
        weight_1 = draw(inner, width) * width**-0.5
        weight_2 = draw(width, inner) * inner**-0.5
        return cls(draw(tokens, width), weight_1, draw(inner), weight_2, draw(width), draw(tokens, width))

    def parameters(self) -> tuple[torch.Tensor, ...]:
        given = self.x, self.weight_1, self.bias_1, self.weight_2, self.bias_2
        return tuple(tensor.detach().requires_grad_() for tensor in given)


def forward_products(given: Inputs) -> dict[str, Call]:
    x, weight, bias = given.x, given.weight_1, given.bias_1
    inner, kept = (torch.empty(len(x), len(weight), device=x.device, dtype=x.dtype) for _ in range(2))
    product = Product(x, weight, inner, turned_right=True, epilogue=GELU_AUX_BIAS, bias=bias, aux=kept)
    return {
        "the product alone": lambda: F.linear(x, weight),
        "linear+bias, gelu": lambda: ops.gelu(F.linear(x, weight, bias)),
        "linear, bias+gelu": lambda: ops.gelu(F.linear(x, weight), bias),
        "_addmm_activation": lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True),
        **proposed("GELU_AUX_BIAS", product),
    }


def backward_products(given: Inputs) -> dict[str, Call]:
    grad_out, weight, bias = given.grad_out, given.weight_2, given.bias_1
    kept = F.linear(given.x, given.weight_1, bias)
    grad, grad_bias = torch.empty_like(kept), torch.empty_like(bias)
    gradient = torch.ops.fuseline.gelu_backward.default
    alone = Product(grad_out, weight, grad, epilogue=DGELU, aux=kept)
    summed = Product(grad_out, weight, grad, epilogue=DGELU_BGRAD, aux=kept, bias=grad_bias)
    return {
        "the product alone": lambda: grad_out @ weight,
        "product, bias+gelu": lambda: gradient(grad_out @ weight, kept, bias, "tanh", [True, True]),
        **proposed("DGELU", alone),
        **proposed("DGELU_BGRAD", summed),
    }


def proposed(name: str, product: Product) -> dict[str, Call]:
    return {f"{name} {i}": functools.partial(product.run, i) for i in range(product.algorithms)}


def bias_in_gelu(
    x: torch.Tensor,
    weight_1: torch.Tensor,
    bias_1: torch.Tensor,
    weight_2: torch.Tensor,
    bias_2: torch.Tensor,
) -> torch.Tensor:
    return F.linear(ops.gelu(F.linear(x, weight_1), bias_1), weight_2, bias_2)


def eager(
    x: torch.Tensor,
    weight_1: torch.Tensor,
    bias_1: torch.Tensor,
    weight_2: torch.Tensor,
    bias_2: torch.Tensor,
) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, weight_1, bias_1), approximate="tanh"), weight_2, bias_2)


def whole(given: Inputs) -> dict[str, dict[str, Call]]:
    """The MLP by each, forward and both ways."""
    parameters = given.parameters()
    layers: dict[str, Layer] = {
        "mlp": ops.mlp,
        "linear, bias+gelu, linear": bias_in_gelu,
        "eager": eager,
        "inductor": torch.compile(eager, dynamic=False),
    }

    def forward(layer: Layer) -> torch.Tensor:
        with torch.no_grad():
            return layer(*parameters)

    def both(layer: Layer) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(layer(*parameters), parameters, given.grad_out)

    wide = [tensor.detach().float().requires_grad_() for tensor in parameters]
    exact = torch.autograd.grad(eager(*wide), wide, given.grad_out.float())
    for name, layer in layers.items():
        errors = (
            float(torch.linalg.vector_norm(found.float() - wanted) / torch.linalg.vector_norm(wanted))
            for found, wanted in zip(both(layer), exact, strict=True)
        )
        print(f"errors of gradients, {name:<26}", *(f"{error:.1e}" for error in errors))
    return {
        "MLP forward": {name: functools.partial(forward, layer) for name, layer in layers.items()},
        "MLP both ways": {name: functools.partial(both, layer) for name, layer in layers.items()},
    }


def in_turn(calls: dict[str, Call], options: Options, device: torch.device) -> dict[str, float]:
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
    native.load()
    device = torch.device("cuda")
    given = Inputs.drawn(options, device)
    groups = {"forward": forward_products(given), "backward": backward_products(given), **whole(given)}
    for group, calls in groups.items():
        for name, time_us in in_turn(calls, options, device).items():
            print(f"{group:<14} {name:<28} {time_us:8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
