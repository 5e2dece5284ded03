"""What generation calls token by token: attention over a cache, linear layers with what stands around them,
and a whole step of a small model.

Not a test: the program that `test_sanitizer.py` runs under compute-sanitizer. --cases prints each call before
it runs, --racecheck leaves out what racecheck cannot judge: in a whole step's kernel a thread that writes an
element of the stream has received what another made of the element before, a word in global memory that
carries its number, which is an order that the tool does not see.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

from fuseline import native
from fuseline.generation.decoder import Decoder
from fuseline.models.gpt import GPT, GPTConfig
from fuseline.models.llama import Llama, preset
from fuseline.nn import RMSNorm, branch
from fuseline.ops.argmax_step import argmax_step
from fuseline.ops.decode_attention import LayerCache, decode_attention, quantized
from fuseline.quant import Format, quantize_linear

Call = Callable[[], object]


def calls(racecheck: bool = False) -> Iterator[tuple[str, Call]]:
    """Contexts of one block, of clusters of two to eight, and of more blocks than a cluster has; each format
    with a norm, with SwiGLU and with a sum; the most likely token by a cluster and by a warp; and steps of
    models with both kinds of norm."""
    for lengths, heads, kv_heads, capacity in (
        ((3, 20), 4, 4, 30),
        ((3, 50), 4, 4, 64),
        ((90,), 6, 2, 128),
        ((250,), 8, 8, 256),
        ((900,), 8, 1, 1024),
    ):
        for storage in (None, torch.int8):
            name = f"attention {heads}:{kv_heads} {capacity} {storage}"
            yield name, attention(lengths, heads, kv_heads, capacity, storage)
    for name in ("int8", "int4", "plain"):
        for rows in (1, 3):
            yield f"{name} {rows} normed", linear(name, rows, 264, 200, norm=True)
            yield f"{name} {rows} swiglu", linear(name, rows, 512, 192, norm=True, activation="swiglu")
            yield f"{name} {rows} added", linear(name, rows, 704, 88, residual=True)
    for rows, vocabulary in ((1, 32003), (3, 100)):
        yield f"argmax_step {rows} of {vocabulary}", argmax_step_of(rows, vocabulary)
    if not racecheck:
        yield "step of a GPT", step(GPT(GPTConfig(256, 300, 2, 2, 128, norm="fuseline")))
    yield "step of a Llama", step(Llama(preset("llama-tiny")))


def attention(
    lengths: tuple[int, ...], heads: int, kv_heads: int, capacity: int, storage: torch.dtype | None
) -> Call:
    B, D = len(lengths), 64

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    k, v = normal(B, kv_heads, capacity, D), normal(B, kv_heads, capacity, D)
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    if storage is not None:
        (k, k_scales), (v, v_scales) = quantized(k, storage), quantized(v, storage)
        scales = k_scales, v_scales
    arrivals = torch.zeros(B * heads, dtype=torch.int32, device="cuda")
    cache = LayerCache(k, v, torch.tensor(lengths, device="cuda"), *scales, arrivals)
    qkv = normal(B, (heads + 2 * kv_heads) * D)
    angles = torch.rand(capacity, D // 2, device="cuda")
    return lambda: decode_attention(
        qkv, cache, heads=heads, count=capacity, cos=angles.cos(), sin=angles.sin()
    )


def linear(
    format: str,
    rows: int,
    k: int,
    n: int,
    *,
    norm: bool = False,
    residual: bool = False,
    activation: str | None = None,
) -> Call:
    plain = torch.nn.Linear(k, n, device="cuda", dtype=torch.bfloat16)
    layer, _ = quantize_linear(plain, Format(format, 128 if format == "int4" else 0))
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    added = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) if residual else None
    normed = RMSNorm(k).to(x.device, x.dtype) if norm else None
    return lambda: branch(layer, x, norm=normed, residual=added, activation=activation)


def argmax_step_of(rows: int, vocabulary: int) -> Call:
    logits = torch.randn(rows, vocabulary, device="cuda", dtype=torch.bfloat16)
    tokens, lengths = (torch.zeros(rows, dtype=torch.int64, device="cuda") for _ in range(2))
    return lambda: argmax_step(logits, tokens, lengths)


def step(model: GPT | Llama) -> Call:
    decoder = Decoder(model.to("cuda", torch.bfloat16).eval(), batch=1, capacity=200, graphs=False)
    decoder.cache.lengths_B.fill_(150)  # nothing is read: cuBLAS's kernels of 16 bits make racecheck fail
    return lambda: decoder.step(decoder.bucket(151))


@torch.no_grad()
def main() -> None:
    assert native.ready("cuda"), native.status()
    for label, call in calls("--racecheck" in sys.argv):
        if "--cases" in sys.argv:
            print(label, flush=True)
        call()
        torch.cuda.synchronize()  # so that an error comes with its call
    print("decoding ran", flush=True)


if __name__ == "__main__":
    main()
