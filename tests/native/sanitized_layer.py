"""The kernels of the small attention layer in each arithmetic, forward and backward, and in a CUDA graph.

Not a test: the program that `test_sanitizer.py` runs under compute-sanitizer. --cases prints each call before
it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuseline import native
from fuseline.ops import self_attention_layer
from fuseline.training.precision import matmul_format

ARITHMETIC = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Batch, length, embedding, heads, heads of keys, columns of the result.
SIZES = ((8, 10, 64, 4, 4, 64), (3, 16, 512, 8, 8, 40), (2, 65, 192, 6, 2, 24), (2, 128, 256, 4, 4, 256))


def calls() -> Iterator[tuple[str, str, Callable[[], object]]]:
    """What is particular about a call, its arithmetic, and the call."""
    for arithmetic, dtype in ARITHMETIC.items():
        for size in SIZES:
            S = size[1]
            keys = torch.arange(S, device="cuda") >= S - 3
            padding = torch.stack([keys if b % 2 else torch.zeros_like(keys) for b in range(size[0])])
            seed = torch.tensor([7], device="cuda")
            for name, options in (
                ("causal", {"causal": True}),
                ("padded, dropout", {"key_padding": padding, "dropout_p": 0.2, "seed": seed}),
            ):
                yield f"{arithmetic} {size} {name}", arithmetic, call(dtype, *size, **options)


def call(
    dtype: torch.dtype, B: int, S: int, E: int, H: int, H_kv: int, columns: int, **options: Any
) -> Callable[[], object]:
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


def main() -> None:
    assert native.ready("cuda"), native.status()
    for label, arithmetic, run in calls():
        if "--cases" in sys.argv:
            print(label, flush=True)
        with matmul_format("bf16" if arithmetic == "fp16" else arithmetic):
            run()
            torch.cuda.synchronize()  # so that an error comes with its call
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    run = call(torch.bfloat16, 4, 64, 256, 4, 4, 256)
    with torch.cuda.stream(stream):
        run()
        with torch.cuda.graph(graph, stream=stream):
            kept = run(), run()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    del kept
    print("layer ran", flush=True)


if __name__ == "__main__":
    main()
