"""The kernels of the small attention layer in each arithmetic, forward and backward, and in a CUDA graph.

Not a test: the program that `test_sanitizer.py` runs under compute-sanitizer. --cases prints each call before
it runs; --only runs calls whose line has one of these texts in it; --seconds begins no call later than that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuseline import native
from fuseline.acceleration.precision import matmul_format
from fuseline.ops import self_attention_layer

ARITHMETIC = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
# Batch, length, embedding, heads, heads of keys, columns of the result.
SIZES = ((8, 10, 64, 4, 4, 64), (3, 16, 512, 8, 8, 40), (2, 65, 192, 6, 2, 24), (2, 128, 256, 4, 4, 256))
# Captured, these are two launches; heads of 64, of 64 in short sequences, and of 32.
CAPTURED = ((4, 64, 256, 4, 4, 256), (4, 16, 512, 8, 8, 40), (2, 128, 256, 8, 8, 256))

Call = Callable[[], object]


def calls() -> Iterator[tuple[str, str, Callable[[], Call]]]:
    """What is particular about a call, its arithmetic, and what makes the call."""
    for arithmetic, dtype in ARITHMETIC.items():
        for size in SIZES:
            yield f"causal {arithmetic} {size}", arithmetic, lambda d=dtype, s=size: call(d, *s, causal=True)  # type: ignore[misc]
            yield f"dropout {arithmetic} {size}", arithmetic, lambda d=dtype, s=size: padded(d, *s)  # type: ignore[misc]
        for size in CAPTURED[: 2 if arithmetic == "fp32" else 3]:  # 128 rows of fp32 are composed
            yield f"captured {arithmetic} {size}", arithmetic, lambda d=dtype, s=size: captured(call(d, *s))  # type: ignore[misc]


def padded(dtype: torch.dtype, B: int, S: int, *sizes: int) -> Call:
    """With dropout, and the last keys of every other batch element hidden."""
    last = torch.arange(S, device="cuda") >= S - 3
    padding = torch.stack([last if b % 2 else torch.zeros_like(last) for b in range(B)])
    seed = torch.tensor([7], device="cuda")
    return call(dtype, B, S, *sizes, key_padding=padding, dropout_p=0.2, seed=seed)


def call(dtype: torch.dtype, B: int, S: int, E: int, H: int, H_kv: int, columns: int, **options: Any) -> Call:
    D = E // H
    rows = (H + 2 * H_kv) * D
    shapes = ((B, S, E), (rows, E), (rows,), (columns, E), (columns,))
    tensors = [(torch.randn(shape, device="cuda") * 0.1).to(dtype).requires_grad_() for shape in shapes]
    grad = torch.randn(B, S, columns, device="cuda").to(dtype)

    def run() -> object:
        out = self_attention_layer(
            *tensors, num_heads=H, num_kv_heads=H_kv, implementation="fused", **options
        )
        return torch.autograd.grad(out, tensors, grad)

    return run


def captured(run: Call) -> Call:
    """Two calls in a graph, so that launches of one overlap with those of the next."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        with torch.cuda.graph(graph, stream=stream):
            kept = run(), run()

    def replay(kept: object = kept) -> None:
        graph.replay()

    return replay


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", action="store_true")
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    assert native.ready("cuda"), native.status()
    wanted = [item for item in calls() if any(text in item[0] for text in options.only)]
    ran = 0
    for label, arithmetic, make in wanted:
        if time.monotonic() - begin > options.seconds:
            break
        if options.cases:
            print(f"{time.monotonic() - begin:.1f} s: {label}", flush=True)
        with matmul_format(arithmetic):
            make()()
            torch.cuda.synchronize()  # so that an error comes with its call
        ran += 1
    print(f"layer ran: {ran} of {len(wanted)} calls", flush=True)


if __name__ == "__main__":
    main()
