"""The attention kernels on small calls with all features, forward and backward, aligned and not.

Not a test: the program that `test_sanitizer.py` runs under compute-sanitizer. --cases prints each call before
it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from fuseline import native

NONE, BOTTOM_RIGHT = 0, 2


def calls() -> Iterator[tuple[str, dict[str, Any]]]:
    """What is particular about a call, and its arguments; sizes are one more or less than whole tiles."""
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        for D in (64, 136):
            yield f"{name} {D} plain", call(dtype, 130, 150, D)
            mask = torch.randn(1, 4, 130, 152, device="cuda", requires_grad=True)
            yield (
                f"{name} {D} mask in tiles",
                call(dtype, 130, 152, D, mask=mask, dropout_p=0.1, soft_cap=3.0),
            )
            mask = torch.randn(1, 4, 1, 1, device="cuda", requires_grad=True)
            yield f"{name} {D} mask of one value", call(dtype, 70, 71, D, mask=mask, dropout_p=0.1)
            mask = torch.rand(2, 1, 1, 151, device="cuda") > 0.2
            yield f"{name} {D} padded keys", call(dtype, 70, 151, D, mask=mask, window_left=40)
        starts = torch.tensor([0, 20, 20, 75], device="cuda", dtype=torch.int32)
        packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 55, "max_seqlen_k": 55}
        yield f"{name} packed", call(dtype, 80, 78, 64, B=1, **packed)
    for D, S in ((64, 152), (128, 151)):
        for shape in ((1, 4, 130, S), (2, 1, 130, S)):
            bias = torch.randn(shape, device="cuda", requires_grad=True)
            yield f"mask {shape} whose gradient is left {D}", call(torch.bfloat16, 130, S, D, mask=bias)
    for T in (136, 264):
        yield f"one pass {T} with dropout", call(torch.bfloat16, T, T, 64, sinks=None, dropout_p=0.1)
    for T, D in ((16, 32), (32, 32), (64, 32), (40, 64), (128, 64), (100, 128)):
        for mask in (None, torch.randn(2, 1, T, T, device="cuda")):
            options: dict[str, Any] = {} if mask is None else {"mask": mask, "dropout_p": 0.1}
            yield f"short {T} {D} {sorted(options)}", call(torch.bfloat16, T, T, D, sinks=None, **options)
    for bounds, longest in (([0, 20, 20, 75], 55), ([0, 100, 107, 230], 123)):
        starts = torch.tensor(bounds, device="cuda", dtype=torch.int32)
        packed = {
            "cu_seqlens_q": starts,
            "cu_seqlens_k": starts,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }
        yield f"short packed {longest}", call(torch.bfloat16, 240, 241, 64, B=1, sinks=None, **packed)
    for T in (32, 64, 128):
        yield f"short {T} 32 of many", call(torch.bfloat16, T, T, 32, B=80 * 128 // T, sinks=None)
    yield (
        "short 70 128 padded",
        call(torch.bfloat16, 70, 90, 128, sinks=None, mask=torch.rand(2, 1, 1, 90, device="cuda") > 0.2),
    )
    for T, D in ((1, 64), (3, 128), (16, 128), (16, 256)):
        yield f"split {T} {D}", call(torch.bfloat16, T, 700, D, wants_grad=False)
    for B, S in ((2, 4000), (140, 600)):
        yield f"split {B} {S}", call(torch.bfloat16, 3, S, 128, B=B, wants_grad=False)


def call(
    dtype: torch.dtype, T: int, S: int, D: int, *, B: int = 2, wants_grad: bool = True, **options: Any
) -> dict[str, Any]:
    def made(heads: int, rows: int) -> torch.Tensor:
        x = torch.randn(B, rows, heads, D, device="cuda", dtype=dtype)
        return x.transpose(1, 2).requires_grad_(wants_grad)

    return {
        "q": made(4, T),
        "k": made(2, S),
        "v": made(2, S),
        "sinks": torch.randn(4, device="cuda", requires_grad=wants_grad),
        "seed": torch.tensor([7], device="cuda"),
        "max_seqlen_q": T,
        "max_seqlen_k": S,
        "causal": BOTTOM_RIGHT if options.get("mask") is None else NONE,
        "softmax_scale": D**-0.5,
    } | options


def main() -> None:
    assert native.ready("cuda"), native.status()
    for label, arguments in calls():
        if "--cases" in sys.argv:
            print(label, flush=True)
        out, lse = torch.ops.fuseline.attention(**arguments)
        if out.requires_grad:
            leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
            torch.autograd.grad([out, lse], leaves, [torch.randn_like(out), torch.randn_like(lse)])
        torch.cuda.synchronize()  # so that an error comes with its call
    print("attention ran", flush=True)


if __name__ == "__main__":
    main()
