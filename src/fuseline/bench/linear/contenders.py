"""Who computes a linear layer, and how: a contender makes calls over weights that together exceed the L2.

Fuseline takes each format as it is stored. Eager int8 is the crash course's own: the weight made bf16 in
every call, by a kernel of its own; inductor fuses that into the product of one row where it is tuned. Eager
bf16 is cuBLAS. tinygemm is torch's int4 kernel. torchao, where it is installed, brings its own int8, and int4
in the format it has for that kernel; its others want a package of kernels beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from fuseline.bench.linear.problems import GROUP_SIZE, Problem
from fuseline.bench.peers.peer import package_version
from fuseline.nn import QuantLinear

TUNING: dict[str, str | int | bool | Callable[..., Any]] = {
    "coordinate_descent_tuning": True,
    "coordinate_descent_check_all_directions": True,
    "force_fuse_int_mm_with_mul": True,
}
"""Of all who compile. torchao sets these for the process when it quantizes: inductor would be tuned or not by
who came before it, and untuned takes 31 us for 4096 x 4096 in int8, where 4000 x 4000 takes 8 tuned."""

Call = Callable[[], torch.Tensor]
Layer = Callable[[torch.Tensor], torch.Tensor]


class CannotError(Exception):
    """This contender does not compute the problem; the message says why."""


def make_calls(peer: str, problem: Problem, x: torch.Tensor, copies: int) -> list[Call]:
    """Calls over `copies` weights, each its own; what compiles does so once for all. Raises `CannotError`."""
    torch._dynamo.reset()
    layers = [MAKERS[peer](problem, x.device) for _ in range(copies)]
    return [partial(layer, x) for layer in layers]


def version(peer: str) -> str | None:
    """Of the package that computes, if that is neither torch nor Fuseline."""
    return package_version("torchao") if peer == "torchao" else None


def fuseline_layer(problem: Problem, device: torch.device) -> Layer:
    format = "plain" if problem.format == "bf16" else problem.format
    layer = QuantLinear(
        problem.k,
        problem.n,
        format,
        group_size=GROUP_SIZE if format == "int4" else 0,
        device=device,
        dtype=torch.bfloat16,
    )
    if layer.weight.dtype == torch.uint8:
        layer.weight.random_()
    else:
        layer.weight.normal_(0, 1 / math.sqrt(problem.k))
    if layer.scales is not None:
        layer.scales.uniform_(0.5 / problem.k, 1.5 / problem.k)
    return layer


def eager_layer(problem: Problem, device: torch.device) -> Layer:
    if problem.format == "int4":
        raise CannotError("eager PyTorch has no int4")
    if problem.format == "bf16":
        return partial(_swapped(F.linear), _random_bf16(problem, device))
    return partial(_int8_linear, *_random_int8(problem, device))


def inductor_layer(problem: Problem, device: torch.device) -> Layer:
    if problem.format == "int4":
        raise CannotError("inductor has no int4 of its own")
    if problem.format == "bf16":
        return partial(_compiled(_bf16_linear), _random_bf16(problem, device))
    return partial(_compiled(_int8_linear), *_random_int8(problem, device))


def tinygemm_layer(problem: Problem, device: torch.device) -> Layer:
    if problem.format != "int4":
        raise CannotError("tinygemm is int4")
    if device.type != "cuda":
        raise CannotError("tinygemm's layout for CPUs is another")
    if problem.k % GROUP_SIZE or problem.n % 8:
        raise CannotError(f"tinygemm takes K in whole groups of {GROUP_SIZE}, and N in eights")
    pairs = torch.randint(0, 256, (problem.n, problem.k // 2), dtype=torch.uint8, device=device)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    scales_and_zeros = torch.rand(
        (problem.k // GROUP_SIZE, problem.n, 2), dtype=torch.bfloat16, device=device
    )
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP_SIZE, scales_and_zeros)


def torchao_layer(problem: Problem, device: torch.device) -> Layer:
    int8 = problem.format == "int8"
    if problem.format == "bf16":
        raise CannotError("torchao has no bf16 of its own")
    if not int8 and device.type != "cuda":
        raise CannotError("torchao's int4 in tinygemm's format is for GPUs")
    if not int8 and problem.k % GROUP_SIZE:
        raise CannotError(f"torchao leaves a weight alone whose K is not in whole groups of {GROUP_SIZE}")
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise CannotError(f"not installed: `pip install torchao` ({error})") from error
    linear = torch.nn.Linear(problem.k, problem.n, bias=False, device=device, dtype=torch.bfloat16)
    tiles = "tile_packed_to_4d"
    int4_config = Int4WeightOnlyConfig(group_size=GROUP_SIZE, int4_packing_format=tiles)
    quantize_(linear, Int8WeightOnlyConfig() if int8 else int4_config)
    return partial(_compiled(_bf16_linear), linear.weight)


MAKERS: dict[str, Callable[[Problem, torch.device], Layer]] = {
    "fuseline": fuseline_layer,
    "eager": eager_layer,
    "inductor": inductor_layer,
    "tinygemm": tinygemm_layer,
    "torchao": torchao_layer,
}
PEERS = tuple(MAKERS)


def _random_bf16(problem: Problem, device: torch.device) -> torch.Tensor:
    return torch.randn((problem.n, problem.k), device=device, dtype=torch.bfloat16) / math.sqrt(problem.k)


def _random_int8(problem: Problem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randint(-128, 128, (problem.n, problem.k), dtype=torch.int8, device=device)
    return weight, torch.rand(problem.n, device=device, dtype=torch.bfloat16) / problem.k


def _int8_linear(weight: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype)) * scales


def _bf16_linear(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def _swapped(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda weight, x: function(x, weight)


def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, dynamic=False, options=TUNING)
