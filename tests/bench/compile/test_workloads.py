"""The five models: their sizes, their FLOPs, and that each can take a step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fuseline.bench.compile.workloads import MODELS, PRESETS, Text, find_workloads
from fuseline.errors import InputError
from fuseline.models.gpt import GPT

CPU = torch.device("cpu")


def counted_parameters(name: str, vocab_size: int) -> int:
    with torch.device("meta"):
        model = PRESETS["full"][name].build(vocab_size)
    return sum(p.numel() for p in model.parameters())


def test_the_full_models_have_the_sizes_they_are_known_by() -> None:
    with torch.device("meta"):
        shakespeare, gpt2 = (
            PRESETS["full"][name].build(v) for name, v in (("shakespeare", 65), ("gpt2", 50304))
        )
    assert isinstance(shakespeare, GPT)
    assert isinstance(gpt2, GPT)
    assert round(shakespeare.num_parameters() / 1e6, 2) == 10.65
    assert round(gpt2.num_parameters() / 1e6, 1) == 123.6
    assert counted_parameters("vit", 0) == 86_567_656
    assert counted_parameters("resnet50", 0) == 25_557_032
    assert counted_parameters("lstm", 8192) == 2 * (8 * 1024**2 + 8 * 1024) + 8192 * 1024 + 8192


def test_the_batches_are_those_of_the_comparison() -> None:
    full = PRESETS["full"]
    assert {name: w.batch_size for name, w in full.items()} == {
        "shakespeare": 64,
        "gpt2": 16,
        "vit": 64,
        "resnet50": 64,
        "lstm": 64,
    }
    assert [w.source.seqlen for w in full.values() if isinstance(w.source, Text)] == [256, 1024, 128]


def test_gpts_are_counted_by_the_formula_in_both_conventions() -> None:
    flops = PRESETS["full"]["gpt2"].flops(50304)
    tokens, parameters = 16 * 1024, 123_587_328
    assert flops["mfu"] == tokens * (6 * parameters + 12 * 12 * 768 * 1024)
    assert flops["mfu_causal"] == tokens * (6 * parameters + 6 * 12 * 768 * 1024)


def test_the_others_are_counted_operation_by_operation() -> None:
    # ViT-B/16: 197 tokens; each block 12 C^2 multiply-adds a token in its products and 2 T C in attention.
    T, C = 197, 768
    forward = 2 * (12 * (12 * C * C * T + 2 * T * T * C) + 196 * 768 * C + C * 1000)
    without_input_gradient = 2 * 196 * 768 * C
    assert PRESETS["full"]["vit"].flops(0)["mfu"] == 64 * (3 * forward - without_input_gradient)
    # The LSTM: 8 C^2 a token and layer, and the head.
    V, C, T = 8192, 1024, 128
    forward = 2 * T * (2 * 8 * C * C + C * V)
    assert PRESETS["full"]["lstm"].flops(V)["mfu"] == pytest.approx(64 * 3 * forward, rel=0.01)
    # ResNet-50: 4.09e9 multiply-adds an image, forward; the first convolution's input wants no gradient.
    assert PRESETS["full"]["resnet50"].flops(0)["mfu"] == pytest.approx(64 * 6 * 4.09e9, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_a_small_model_learns_from_its_own_loader(name: str) -> None:
    workload = PRESETS["small"][name]
    dataset = SimpleNamespace(train=np.arange(5000, dtype=np.uint16) % 50, vocab_size=50)
    torch.manual_seed(0)
    model = workload.build(workload.vocab_size(dataset))  # type: ignore[arg-type]
    loader = workload.loader(dataset, 0, CPU)  # type: ignore[arg-type]
    try:
        batch = next(loader)
        loss = model(*batch)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
        assert model(*batch) < loss
    finally:
        loader.close()


def test_names_keep_their_order_and_unknown_ones_are_met_with_the_nearest() -> None:
    assert [w.name for w in find_workloads(("vit", "lstm", "vit"), "small")] == ["vit", "lstm"]
    with pytest.raises(InputError, match=r"no model named 'resnet'\. Did you mean 'resnet50'"):
        find_workloads(("resnet",), "full")
    with pytest.raises(InputError, match="no preset named 'large'"):
        find_workloads(("vit",), "large")
