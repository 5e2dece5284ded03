"""Rotary position embedding of queries or keys.

Among the first `dims` elements of each head, pair i is rotated by the angle position * base^(-2i / dims):

    a' = a * cos - b * sin,  b' = b * cos + a * sin

Pair i is elements (i, i + dims / 2) ("half-split": GPT-NeoX, Llama), or with `interleaved` (2i, 2i + 1)
(GPT-J). The other elements are passed through. x is [T, D], [H, T, D] or [B, H, T, D], or with seq_dim=-3
[T, H, D] or [B, T, H, D]. It may be a part of a larger tensor or transposed, and is read through its strides;
the result has the same order in memory. dtypes: float32, float16, bfloat16, float64 (on a
GPU float64 runs the reference).

The angles come from tables of cosines and sines, or the kernel computes them: position times the turns of one
position in 64-bit fixed point, which is exact for any position (fp32 angles are off by 1e-3 at position
10,000, half-precision ones by whole turns). The gradient is rotated by minus the angle; tables get no
gradient. Under autocast the dtype stays that of x.

Not twice differentiable. Source: Su et al., "RoFormer", 2021, equation 34.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from fuseline import native
from fuseline.errors import InputError
from fuseline.native import direct
from fuseline.ops.op import Case, Op, register
from fuseline.ops.transforms import serve


def rope_angles(positions: torch.Tensor, dims: int, base: float = 10000.0) -> torch.Tensor:
    """The angles of `positions` [...] as [..., dims / 2] in float64. Their cosines and sines make tables."""
    exponents = torch.arange(dims // 2, dtype=torch.float64, device=positions.device) * (-2.0 / max(dims, 1))
    return positions.double().unsqueeze(-1) * base**exponents


def reference(
    x: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    positions: torch.Tensor | None = None,
    base: float = 10000.0,
    interleaved: bool = False,
    dims: int | None = None,
    seq_dim: int = -2,
) -> torch.Tensor:
    """The definition in plain PyTorch, for every device; rounded once, at the end."""
    wide = torch.promote_types(x.dtype, torch.float32)
    tokens = seq_dim if seq_dim < 0 else seq_dim - x.dim()
    if tokens not in (-2, -3) or x.dim() > 4 or x.dim() < -tokens:
        raise InputError(
            f"rope: x has shape {list(x.shape)} and seq_dim is {seq_dim}. x is [T, D], [H, T, D] or "
            "[B, H, T, D] with seq_dim=-2, or [T, H, D] or [B, T, H, D] with seq_dim=-3."
        )
    dims = x.shape[-1] - x.shape[-1] % 2 if dims is None else dims
    numbers = torch.arange(x.shape[tokens], device=x.device) if positions is None else positions
    if cos is None or sin is None:
        angles = rope_angles(numbers, dims, base)
        cos, sin = angles.cos(), angles.sin()
    else:
        cos, sin = cos[numbers], sin[numbers]
    cos, sin = cos.to(wide), sin.to(wide)  # [T, dims / 2] or [B, T, dims / 2]
    if tokens == -3:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    elif cos.dim() == 3 and x.dim() == 4:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = x[..., :dims].to(wide)
    if interleaved:
        left, right = turned[..., 0::2], turned[..., 1::2]
    else:
        left, right = turned.chunk(2, dim=-1) if dims else (turned, turned)
    one, other = left * cos - right * sin, right * cos + left * sin
    turned = torch.stack((one, other), -1).flatten(-2) if interleaved else torch.cat((one, other), -1)
    return torch.cat((turned.to(x.dtype), x[..., dims:]), -1)


def rope(
    x: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    positions: torch.Tensor | None = None,
    base: float = 10000.0,
    interleaved: bool = False,
    dims: int | None = None,
    seq_dim: int = -2,
) -> torch.Tensor:
    """Rotate x by its positions, in one pass each way.

    Args:
        x: [T, D], [H, T, D] or [B, H, T, D]; with seq_dim=-3 [T, H, D] or [B, T, H, D]. float32, float16,
            bfloat16 or float64.
        cos, sin: tables [positions, dims / 2], both or neither; best in float32. A position outside them
            gives NaN on a GPU and IndexError on a CPU. Without them the angles are computed.
        positions: int64, [T] or [B, T]; 0, 1, .. if absent.
        base: the base of the angles, where they are computed.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + dims / 2).
        dims: how many elements of a head are rotated, an even number; all if absent (without the last one
            if D is odd).
        seq_dim: the dimension of x that counts tokens, -2 or -3.

    Returns x's shape and dtype.
    Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    if not is_dynamo_compiling():
        y = direct.rope(x, cos, sin, positions, base, interleaved, dims, seq_dim)
        if y is not None:
            return y
    device = x.device.type
    if native.ready(device) and not (device == "cuda" and x.dtype is torch.float64):
        return torch.ops.fuseline.rope.default(
            x,
            cos,
            sin,
            positions=positions,
            base=base,
            interleaved=interleaved,
            dims=dims,
            seq_dim=seq_dim,
        )
    return reference(
        x,
        cos,
        sin,
        positions=positions,
        base=base,
        interleaved=interleaved,
        dims=dims,
        seq_dim=seq_dim,
    )


def rope_pair(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    positions: torch.Tensor | None = None,
    base: float = 10000.0,
    interleaved: bool = False,
    dims: int | None = None,
    seq_dim: int = -2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope` of queries and keys, in one launch each way where all their sizes but the heads are alike.

    Arguments, errors and the results' bits are those of `rope`; `dims` is each one's own if absent.
    """
    how: dict[str, Any] = {
        "positions": positions,
        "base": base,
        "interleaved": interleaved,
        "dims": dims,
        "seq_dim": seq_dim,
    }
    device = q.device.type
    if native.ready(device) and not (device == "cuda" and torch.float64 in (q.dtype, k.dtype)):
        both: tuple[torch.Tensor, torch.Tensor]
        both = torch.ops.fuseline.rope_pair.default(q, k, cos, sin, **how)
        return both
    return rope(q, cos, sin, **how), rope(k, cos, sin, **how)


def _pair_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference(q, cos, sin, **how), reference(k, cos, sin, **how)


serve("rope_pair", _pair_reference)


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    options = dict(case.options)
    table, positions = options.pop("table", 0), options.pop("positions", None)
    draw: dict[str, Any] = {"generator": generator, "device": device}
    x = torch.randn(case.shape, dtype=torch.float32, **draw).to(dtype)
    if options.pop("swapped", False):  # heads and tokens are swapped in memory
        x = x.transpose(-2, -3).contiguous().transpose(-2, -3)
    arguments: dict[str, Any] = {"x": x, **options}
    if table:
        dims = options.get("dims", case.shape[-1])
        angles = rope_angles(torch.arange(table, device=device), dims, 500.0)
        arguments["cos"], arguments["sin"] = angles.cos().float(), angles.sin().float()
    if positions is not None:
        arguments["positions"] = torch.randint(table or 100_000, positions, **draw)
    return arguments


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    return 2 * math.prod(case.shape) * itemsize


def _flops(case: Case, direction: str) -> int:
    return 3 * math.prod(case.shape)


def _sweep(rows: int, n: int) -> Case:
    """`rows` heads of n elements in total: as many sequences of 1,024 tokens with 16 heads as that takes."""
    tokens = min(rows, 1024)
    heads = max(1, min(16, rows // tokens))
    return Case(f"{rows}x{n}", (max(1, rows // (tokens * heads)), heads, tokens, n))


ROPE = register(
    Op(
        name="rope",
        function=rope,
        reference=reference,
        inputs=_inputs,
        differentiable=("x",),
        cases=(
            Case("one head", (33, 64)),
            Case("heads of 64", (2, 5, 33, 64)),
            Case("heads of 128", (1, 3, 40, 128), {"base": 500000.0}),
            Case("tokens before heads", (2, 33, 6, 64), {"seq_dim": -3}),
            Case("transposed", (2, 6, 33, 64), {"swapped": True}),
            Case("transposed, tokens before heads", (2, 33, 6, 64), {"swapped": True, "seq_dim": 1}),
            Case("interleaved", (2, 5, 33, 64), {"interleaved": True}),
            Case("interleaved, tokens before heads", (2, 33, 5, 32), {"interleaved": True, "seq_dim": -3}),
            Case("a quarter of the head", (2, 5, 33, 64), {"dims": 16}),
            Case("a part of the head", (2, 5, 33, 80), {"dims": 32, "interleaved": True}),
            Case("nothing turned", (2, 3, 9, 16), {"dims": 0}),
            Case("tables", (2, 5, 33, 64), {"table": 40}),
            Case("tables, interleaved", (2, 5, 33, 64), {"table": 33, "interleaved": True}),
            Case("tables, positions", (2, 5, 33, 64), {"table": 50, "positions": (33,)}),
            Case("tables, a part", (2, 33, 5, 48), {"table": 33, "dims": 32, "seq_dim": -3}),
            Case("far positions", (2, 5, 33, 64), {"positions": (2, 33)}),
            Case("far positions, tokens before heads", (2, 33, 5, 64), {"positions": (2, 33), "seq_dim": -3}),
            Case("three dimensions", (4, 17, 32)),
            Case("three dimensions, positions", (4, 17, 32), {"positions": (4, 17)}),
            Case("three dimensions, tokens first", (17, 4, 32), {"seq_dim": -3}),
            Case("small heads", (2, 3, 7, 6)),
            Case("odd heads", (2, 3, 7, 9), {"interleaved": True}),
            Case("one token", (4, 12, 1, 64), {"positions": (4, 1)}),
            Case("no tokens", (2, 3, 0, 8)),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
        sweep=_sweep,
        lengths=(32, 64, 80, 96, 128, 256),
    )
)
