"""The head's three matrix products alone, at a vocabulary as it is and padded.

With C channels and V tokens over R = B T rows they are: logits [R, V] = x [R, C] W^T, grad_x [R, C] = g W,
and grad_weight [V, C] = g^T x. An odd V leaves rows of 16-bit numbers unaligned, and the matrix units then
load them piecemeal; seed 001 saw nearly 3x here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fuseline.bench.ladder.result import Figure, ratio
from fuseline.records import Environment, Record
from fuseline.records.record import Scalar
from fuseline.timing import Summary, time_calls

PRODUCTS = {"logits": "fw", "grad_x": "bw", "grad_weight": "bw"}


def products(
    rows: int, embed_dim: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> Mapping[str, Callable[[], torch.Tensor]]:
    """The three products over random operands."""
    x_RC = torch.randn(rows, embed_dim, dtype=dtype, device=device)
    weight_VC = torch.randn(vocab_size, embed_dim, dtype=dtype, device=device)
    grad_RV = torch.randn(rows, vocab_size, dtype=dtype, device=device)
    return {
        "logits": lambda: x_RC @ weight_VC.T,
        "grad_x": lambda: grad_RV @ weight_VC,
        "grad_weight": lambda: grad_RV.T @ x_RC,
    }


def measure(
    *,
    rows: int,
    embed_dim: int,
    vocab_size: int,
    multiple: int,
    dtype: torch.dtype,
    device: torch.device,
    environment: Environment,
    repeats: int = 30,
) -> list[Record]:
    """Records of section `head_gemm`: `time_us` and `tflops` of each product at both vocabularies, and
    `speedup` (exact over padded) of each."""
    padded = -(-vocab_size // multiple) * multiple
    times: dict[int, dict[str, Summary]] = {}
    for vocab in dict.fromkeys((vocab_size, padded)):
        calls = products(rows, embed_dim, vocab, dtype, device)
        times[vocab] = {name: time_calls(call, device, repeats=repeats) for name, call in calls.items()}
    records: list[Record] = []
    for vocab, by_name in times.items():
        for name, time_us in by_name.items():
            case: dict[str, Scalar] = {
                "section": "head_gemm",
                "product": name,
                "direction": PRODUCTS[name],
                "dtype": str(dtype).removeprefix("torch."),
                "rows": rows,
                "embed_dim": embed_dim,
                "vocab": vocab,
            }
            figures = {
                "time_us": Figure.of(time_us),
                "tflops": Figure(2 * rows * embed_dim * vocab / time_us.median / 1e6, n=time_us.n),
            }
            if vocab != vocab_size:
                figures["speedup"] = ratio(Figure.of(times[vocab_size][name]), figures["time_us"])
            records += [
                Record.of("ladder", case, metric, f.value, environment, low=f.low, high=f.high, n=f.n)
                for metric, f in figures.items()
            ]
    return records
