"""Who computes a linear layer, and how: a contender makes calls over weights that together exceed the L2.

Fuseline takes each format as it is stored. Eager int8 and int4 are the crash course's own: the weight made
bf16 in every call, by kernels of their own; inductor fuses that into the product of one row where it is
tuned. Eager bf16 is cuBLAS, eager fp8 its product of fp8, with the rows of x quantized before. tinygemm is
torch's int4 kernel. torchao, where it is installed, brings its own int8, and int4 in the format it has for
that kernel; its others want a package of kernels beside it. Its int8 is slow from two rows on, 326 us beside
eight and 1,210 beside 32 of 4096 x 4096: inductor takes the product that it writes, mm(x, w.t().to(bf16)) *
scales, for `aten._weight_int8pack_mm`, of which a thread computes each result alone, and not the same product
by `linear`. max-autotune is inductor that also times Triton's templates beside cuBLAS.
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
from fuseline.ops.fp8_rows import E4M3_MAX, runs_in_fp8

TUNING: dict[str, str | int | bool | Callable[..., Any]] = {
    "coordinate_descent_tuning": True,
    "coordinate_descent_check_all_directions": True,
    "force_fuse_int_mm_with_mul": True,
}
"""Of all who compile. torchao sets these for the process when it quantizes: inductor would be tuned or not by
who came before it, and untuned takes 31 us for 4096 x 4096 in int8, where 4000 x 4000 takes 8 tuned."""

Call = Callable[[], torch.Tensor]
Layer = Callable[[torch.Tensor], torch.Tensor]
_Maker = Callable[[Problem, torch.device], tuple[torch.Tensor, ...]]


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
    elif format == "fp8":
        layer.weight.copy_(torch.randn(layer.weight.shape, device=device))
    else:
        layer.weight.normal_(0, 1 / math.sqrt(problem.k))
    if layer.scales is not None:
        layer.scales.uniform_(0.5 / problem.k, 1.5 / problem.k)
    return layer


def eager_layer(problem: Problem, device: torch.device) -> Layer:
    function, make = _torch_linear(problem, device)
    return partial(function, *make(problem, device))


def inductor_layer(problem: Problem, device: torch.device) -> Layer:
    function, make = _torch_linear(problem, device)
    return partial(_compiled(function), *make(problem, device))


def max_autotune_layer(problem: Problem, device: torch.device) -> Layer:
    if device.type != "cuda":
        raise CannotError("max-autotune on a processor tunes products that are compiled with their weights")
    function, make = _torch_linear(problem, device)
    return partial(_compiled(function, max_autotune=True), *make(problem, device))


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
    if problem.format not in ("int8", "int4"):
        raise CannotError(f"torchao's {problem.format} is torch's own")
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
    "max-autotune": max_autotune_layer,
    "tinygemm": tinygemm_layer,
    "torchao": torchao_layer,
}
PEERS = tuple(MAKERS)


def _torch_linear(problem: Problem, device: torch.device) -> tuple[Callable[..., torch.Tensor], _Maker]:
    """The product in torch's ops, and what makes the weight that it takes."""
    if problem.format == "fp8" and not runs_in_fp8(device, problem.k, problem.n):
        raise CannotError("torch's product in fp8 is for GPUs that have it, K and N in sixteens")
    known: dict[str, tuple[Callable[..., torch.Tensor], _Maker]] = {
        "bf16": (_bf16_linear, _random_bf16),
        "int8": (_int8_linear, _random_int8),
        "int4": (_int4_linear, _random_int4),
        "fp8": (_fp8_linear, _random_fp8),
    }
    return known[problem.format]


def _random_bf16(problem: Problem, device: torch.device) -> tuple[torch.Tensor, ...]:
    size = problem.n, problem.k
    return (torch.randn(size, device=device, dtype=torch.bfloat16) / math.sqrt(problem.k),)


def _random_int8(problem: Problem, device: torch.device) -> tuple[torch.Tensor, ...]:
    weight = torch.randint(-128, 128, (problem.n, problem.k), dtype=torch.int8, device=device)
    return weight, torch.rand(problem.n, device=device, dtype=torch.bfloat16) / problem.k


def _random_int4(problem: Problem, device: torch.device) -> tuple[torch.Tensor, ...]:
    groups = -(-problem.k // GROUP_SIZE)
    pairs = torch.randint(0, 256, (problem.n, groups * GROUP_SIZE // 2), dtype=torch.uint8, device=device)
    scales = torch.rand((problem.n, groups), device=device, dtype=torch.bfloat16) / problem.k
    return pairs, scales, torch.tensor([0, 4], dtype=torch.uint8, device=device)


def _random_fp8(problem: Problem, device: torch.device) -> tuple[torch.Tensor, ...]:
    weight = torch.randn((problem.n, problem.k), device=device).to(torch.float8_e4m3fn)
    return weight, torch.rand(problem.n, device=device) / problem.k


def _bf16_linear(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def _int8_linear(weight: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype)) * scales


def _int4_linear(
    pairs: torch.Tensor, scales: torch.Tensor, shifts: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Two columns a byte, the even one below; rows end with a whole group, of which K may leave a part."""
    integers = (pairs[:, :, None] >> shifts & 15).view(*scales.shape, GROUP_SIZE)
    weight = (integers.to(x.dtype) - 8) * scales[:, :, None]
    return F.linear(x, weight.flatten(1)[:, : x.shape[-1]])


def _fp8_linear(weight: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    of_x = x.abs().amax(dim=-1, keepdim=True).float() / E4M3_MAX
    x8 = (x / of_x).to(torch.float8_e4m3fn)
    return torch._scaled_mm(
        x8, weight.t(), scale_a=of_x, scale_b=scales[None], out_dtype=x.dtype, use_fast_accum=True
    )


def _compiled(function: Callable[..., torch.Tensor], **more: bool) -> Callable[..., torch.Tensor]:
    return torch.compile(function, dynamic=False, options={**TUNING, **more})
