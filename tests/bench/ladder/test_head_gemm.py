"""The head's products: right, and recorded at both vocabularies."""

from __future__ import annotations

import torch

from fuseline.bench.ladder import head_gemm
from fuseline.records import describe

CPU = torch.device("cpu")


def test_the_products_have_the_shapes_of_the_heads_three():
    calls = head_gemm.products(6, 5, 7, torch.float32, CPU)
    assert {name: tuple(call().shape) for name, call in calls.items()} == {
        "logits": (6, 7),
        "grad_x": (6, 5),
        "grad_weight": (7, 5),
    }


def test_each_product_is_timed_at_both_vocabularies_and_compared():
    records = head_gemm.measure(
        rows=8,
        embed_dim=16,
        vocab_size=65,
        multiple=64,
        dtype=torch.float32,
        device=CPU,
        environment=describe("cpu"),
        repeats=2,
    )
    times = {(r.case["product"], r.case["vocab"]): r for r in records if r.metric == "time_us"}
    assert set(times) == {(name, vocab) for name in head_gemm.PRODUCTS for vocab in (65, 128)}
    for record in (r for r in records if r.metric == "speedup"):
        name = record.case["product"]
        assert record.value == times[name, 65].value / times[name, 128].value
    for record in (r for r in records if r.metric == "tflops"):
        time_us = times[record.case["product"], record.case["vocab"]].value
        assert record.value == 2 * 8 * 16 * record.case["vocab"] / time_us / 1e6
