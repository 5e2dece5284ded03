"""Sampling: repeatable, within top_k, greedy at temperature 0, and true to the model's probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fuseline.errors import InputError
from fuseline.generation.sampling import sample
from fuseline.models.gpt import GPT, GPTConfig

PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(
        block_size=8, vocab_size=13, num_layers=1, num_heads=2, embed_dim=16, dropout=0.5, vocab_multiple=16
    )
    model = GPT(config).train()
    with torch.no_grad():
        model.transformer.wte.weight[:13].mul_(6)  # logits far enough apart for a top_k to matter
    return model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def greedy_by_hand(model: GPT, tokens: Tensor, count: int) -> Tensor:
    model.eval()
    for _ in range(count):
        logits = model(tokens[:, -8:])[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    model.train()
    return tokens


def test_same_generator_state_same_tokens(model: GPT) -> None:
    first = sample(model, PROMPT, 30, generator=seeded())
    assert first.shape == (2, 33)
    assert torch.equal(first[:, :3], PROMPT)
    assert torch.equal(sample(model, PROMPT, 30, generator=seeded()), first)
    assert not torch.equal(sample(model, PROMPT, 30, generator=seeded(1)), first)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}, {"temperature": 1e-6}])
def test_greedy_reads_the_last_block_of_tokens(model: GPT, options: dict[str, float]) -> None:
    expected = greedy_by_hand(model, PROMPT, 20)  # 20 tokens: past block_size, so the context is cropped
    assert torch.equal(sample(model, PROMPT, 20, generator=seeded(), **options), expected)


@pytest.mark.parametrize("top_k,temperature", [(None, 1.0), (3, 1.0), (3, 2.0), (None, 2.0), (99, 0.5)])
def test_draws_follow_the_models_probabilities(model: GPT, top_k: int | None, temperature: float) -> None:
    count = 20_000
    drawn = sample(
        model, PROMPT[:1].expand(count, -1), 1, top_k=top_k, temperature=temperature, generator=seeded()
    )
    frequencies = torch.bincount(drawn[:, -1], minlength=16) / count
    logits = model.eval()(PROMPT[:1])[0, -1].detach() / temperature
    model.train()
    if top_k == 3:
        logits[logits < logits.topk(3).values[-1]] = -math.inf
    expected = torch.cat([logits.softmax(-1), torch.zeros(3)])  # the padding is never drawn
    assert torch.equal(frequencies[expected == 0], torch.zeros(int((expected == 0).sum())))
    # Five deviations of a frequency over that many draws.
    assert ((frequencies - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_ties_do_not_widen_top_k(model: GPT) -> None:
    flat = GPT(model.config)
    with torch.no_grad():
        flat.lm_head.weight.zero_()
    drawn = sample(flat, PROMPT[:1].expand(500, -1), 1, top_k=4, generator=seeded())
    assert len(drawn[:, -1].unique()) == 4


def test_the_model_is_left_as_it_was(model: GPT) -> None:
    assert model.training
    assert not sample(model, PROMPT, 2, generator=seeded()).requires_grad
    assert model.training
    assert torch.equal(sample(model, PROMPT, 0), PROMPT)


@pytest.mark.parametrize(
    "prompt,options,message",
    [
        (torch.zeros(1, 0, dtype=torch.int64), {}, "a token or more"),
        (torch.tensor([1, 2]), {}, r"shape \[2\]"),
        (torch.tensor([[13]]), {}, r"the model knows 0\.\.12"),
        (PROMPT, {"temperature": -1.0}, "temperature is -1.0"),
        (PROMPT, {"temperature": math.nan}, "temperature is nan"),
        (PROMPT, {"top_k": 0}, "top_k is 0"),
    ],
)
def test_bad_input_is_refused(model: GPT, prompt: Tensor, options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sample(model, prompt, 5, **options)


def test_negative_counts_are_refused(model: GPT) -> None:
    with pytest.raises(InputError, match="max_new_tokens is -1"):
        sample(model, PROMPT, -1)
