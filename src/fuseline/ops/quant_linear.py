"""Linear layer with quantized weights: y = x W^T + bias. The kernels read W as it is stored.

    int8    W[n, k] = scales[n] * q[n, k],  q in -128 .. 127
    int4    W[n, k] = scales[n, g] * (q[n, k] - zeros[n, g]),  q in 0 .. 15, g = k / group_size
            (zeros are 8 where none are given)
    plain   W itself, in x's dtype: the weight of torch.nn.Linear

x is [.., K] in float32, float16, bfloat16 or float64, and y is [.., N] in the same dtype. Sums are fp32
(float64 for float64) and are multiplied by the scales, so that no weight is rounded. Quantized weights are in
the kernels' layout (`fuseline.ops.quant_layout` packs and unpacks them). int8 scales are [N] of float32, int4
scales are bfloat16.

On a GPU the kernels handle x in 16 bits with up to 512 rows, and up to 1,024 rows if the weight has 32 M
elements or more; on GPUs other than Hopper up to 128. For "plain" they handle up to 4 rows, and up to 8 where
K is at least 7 and not a multiple of 8. With more rows or in other dtypes the weight is dequantized, which
rounds it to x's dtype, and torch multiplies. The int4 kernel rounds the weights in the same way from 33 rows
of x on, and from 17 rows on with zero points or groups of fewer than 128.

Only x gets a gradient; weight, scales and bias are frozen. On Hopper the kernel may read a weight that an
earlier call has read while the launch ahead of it still runs. torch's version counter shows when the weight
was written in between; after a write that the counter does not see (through `.data`, by a collective, by a
kernel of your own) synchronize before the next call.

`fuseline.quantize` makes these formats. Groups with zero points: Frantar et al., GPTQ, 2022.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from fuseline import native
from fuseline.native import direct
from fuseline.ops.op import Case, Op, register
from fuseline.ops.quant_layout import dequantize, pack_groups, pack_int4, pack_int8


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    out_features: int,
    format: str = "int8",
    group_size: int = 0,
) -> torch.Tensor:
    """The definition in plain PyTorch: a linear layer over the weight, dequantized to x's dtype."""
    whole = dequantize(
        weight,
        scales,
        zeros,
        out_features=out_features,
        in_features=x.shape[-1],
        format=format,
        group_size=group_size,
        dtype=x.dtype,
    )
    return F.linear(x, whole, None if bias is None else bias.to(x.dtype))


def quant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    out_features: int,
    format: str = "int8",
    group_size: int = 0,
) -> torch.Tensor:
    """x W^T + bias, with W in one of the formats that the module describes.

    Args:
        x: [.., K], any strides.
        weight: int8 [N / 16, K / 64, 1024] and int4 [N / 16, K / 64, 512] of uint8, rounded up; plain [N, K].
        scales: int8 [N], int4 [N / 16, K / group_size, 8, 2]; None for plain.
        zeros: the zero points of int4, uint8 of the scales' shape; 8 if absent.
        bias: [N] of x's dtype.
        out_features: N.
        format: "int8", "int4" or "plain".
        group_size: how many columns share a scale in int4: 32, 64, 128 or another power of two.

    Returns [.., N] in x's dtype. Raises ValueError or TypeError for what does not fit, NotImplementedError
    where weight, scales or bias require a gradient.
    """
    if not is_dynamo_compiling():
        y = direct.quant_linear(x, weight, scales, zeros, bias, out_features, format, group_size)
        if y is not None:
            return y
    if native.ready(x.device.type) and not (x.device.type == "cuda" and x.dtype is torch.float64):
        return torch.ops.fuseline.quant_linear.default(
            x, weight, scales, zeros, bias, out_features=out_features, format=format, group_size=group_size
        )
    return reference(
        x, weight, scales, zeros, bias, out_features=out_features, format=format, group_size=group_size
    )


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    n, format, group_size = _weight_of(case)
    k = case.shape[-1]
    draw: dict[str, Any] = {"generator": generator, "device": device}
    x = torch.randn(case.shape, **draw).to(dtype)
    arguments: dict[str, Any] = {"x": x, "out_features": n, "format": format, "group_size": group_size}
    scale = 1 / math.sqrt(max(1, k))
    if format == "plain":
        arguments["weight"] = (torch.randn((n, k), **draw) * scale).to(dtype)
    elif format == "int8":
        arguments["weight"] = pack_int8(torch.randint(-128, 128, (n, k), dtype=torch.int8, **draw))
        arguments["scales"] = (torch.rand((n,), **draw) + 0.5) * (scale / 64)
    else:
        groups = -(-k // group_size)
        arguments["weight"] = pack_int4(torch.randint(0, 16, (n, k), dtype=torch.uint8, **draw))
        arguments["scales"] = pack_groups((torch.rand((n, groups), **draw) + 0.5) * (scale / 4)).bfloat16()
        if case.options.get("zeros"):
            arguments["zeros"] = pack_groups(torch.randint(0, 16, (n, groups), dtype=torch.uint8, **draw))
    if case.options.get("bias"):
        arguments["bias"] = torch.randn((n,), **draw).to(dtype)
    return arguments


def _weight_of(case: Case) -> tuple[int, str, int]:
    """out_features, format and group size of a case."""
    return case.options.get("n", 40), case.options.get("format", "int8"), case.options.get("group_size", 0)


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    n, format, group_size = _weight_of(case)
    k = case.shape[-1]
    rows = math.prod(case.shape[:-1])
    a_group = 3 if case.options.get("zeros") else 2
    weight = {"plain": n * k * itemsize, "int8": n * k + 4 * n}.get(
        format, n * k // 2 + a_group * n * -(-k // max(1, group_size))
    )
    return weight + rows * (n + k) * itemsize


def _flops(case: Case, direction: str) -> int:
    return 2 * math.prod(case.shape) * _weight_of(case)[0]


def _sweep(rows: int, n: int) -> Case:
    """`rows` rows of n activations through a layer of 1,024 features; `bench linear` has larger layers."""
    return Case(f"{rows}x{n}", (rows, n), {"n": min(n, 1024)})


QUANT_LINEAR = register(
    Op(
        name="quant_linear",
        function=quant_linear,
        reference=reference,
        inputs=_inputs,
        differentiable=("x",),
        cases=(
            Case("17x70", (17, 70)),
            Case("one row", (1, 256), {"n": 64}),
            Case("no batch", (130,), {"n": 33, "bias": True}),
            Case("three dimensions", (2, 3, 128), {"n": 48, "bias": True}),
            Case("int8, 40 rows", (40, 200), {"n": 100}),
            Case("int4, groups of 128", (3, 256), {"n": 64, "format": "int4", "group_size": 128}),
            Case("int4, groups of 64", (9, 192), {"n": 48, "format": "int4", "group_size": 64, "bias": True}),
            Case("int4, groups of 32", (1, 96), {"n": 40, "format": "int4", "group_size": 32}),
            Case(
                "int4, zero points",
                (5, 200),
                {"n": 50, "format": "int4", "group_size": 32, "zeros": True, "bias": True},
            ),
            Case("int4, 33 rows", (33, 333), {"n": 31, "format": "int4", "group_size": 64, "zeros": True}),
            Case("int8, 130 rows", (130, 96), {"n": 136, "bias": True}),
            Case("int4, 70 rows", (70, 200), {"n": 130, "format": "int4", "group_size": 32, "zeros": True}),
            Case("plain", (4, 128), {"n": 72, "format": "plain", "bias": True}),
            Case("plain, odd", (3, 65), {"n": 7, "format": "plain"}),
            Case("no rows", (0, 64), {"n": 16}),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
        sweep=_sweep,
        lengths=(768, 1024, 2048, 4096, 8192),
        by_blas=True,
    )
)
