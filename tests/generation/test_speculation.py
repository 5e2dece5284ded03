"""Speculation: greedy the same tokens, drawn the same distribution, whatever the draft."""

from __future__ import annotations

import pytest
import torch

from fuseline.errors import InputError
from fuseline.generation.choice import Sampling, probabilities
from fuseline.generation.generate import generate
from fuseline.generation.speculation import Speculator, kept, speculate
from fuseline.models.gpt import GPT, GPTConfig

from .conftest import PROMPTS, made, recomputed


@pytest.mark.parametrize("draft", ["llama", "windowed", "gpt"])
@pytest.mark.parametrize("ahead", [1, 4])
def test_greedy_is_the_models_own(draft: str, ahead: int) -> None:
    model = made("llama")
    expected = [recomputed(model, prompt, 30) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 30, draft=made(draft), ahead=ahead) == expected


def test_a_model_drafting_for_itself_keeps_all() -> None:
    model = made("llama")
    speculator = Speculator(model, model, batch=3, capacity=60, ahead=4)
    rounds = list(speculate(speculator, PROMPTS, 21))
    assert [len(row) for rows in rounds for row in rows] == [1] * 3 + [5] * 12


def test_what_comes_out_is_the_models_distribution() -> None:
    """Of one position: 200,000 rounds of a draft that is far off, and all tokens counted."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(2, 12, generator=generator).mul(1.5).softmax(-1) for _ in range(2))
    count = 200_000
    drafted = torch.multinomial(q[0], count, replacement=True, generator=generator).unsqueeze(1)
    p_BKV = p.expand(count, 2, 12)
    q_BKV = torch.stack([q[0], torch.zeros(12)]).expand(count, 2, 12)
    number, following = kept(p_BKV, q_BKV, drafted, generator)
    first = torch.where(number == 1, drafted[:, 0], following)
    for tokens, expected in ((first, p[0]), (following[number == 1], p[1])):
        frequencies = torch.bincount(tokens, minlength=12) / len(tokens)
        chi_square = float((len(tokens) * (frequencies - expected).square() / expected).sum())
        assert chi_square < 31.3  # 11 degrees of freedom: one in a thousand
    overlap = float(torch.minimum(p[0], q[0]).sum())
    assert float((number == 1).float().mean()) == pytest.approx(overlap, abs=0.01)


def test_two_tokens_together_are_the_models_distribution() -> None:
    torch.manual_seed(0)
    model, draft = (GPT(GPTConfig(32, 4, 1, 2, 16)).eval() for _ in range(2))
    with torch.no_grad():
        for parameter in (*model.parameters(), *draft.parameters()):
            parameter.mul_(8)
    sampling, rows = Sampling(0.9, top_p=0.9), 6000
    found = generate(model, [[1, 2]] * rows, 3, sampling=sampling, draft=draft, ahead=2, seed=3)
    pairs = torch.zeros(4, 4)
    for _, second, third in (tokens for tokens in found if tokens[0] == found[0][0]):
        pairs[second, third] += 1
    with torch.no_grad():
        tails = torch.tensor([[1, 2, found[0][0], token] for token in range(4)])
        first = probabilities(model(tails[:1, :3])[:, -1], sampling)[0]
        expected = first[:, None] * probabilities(model(tails)[:, -1], sampling)
    total = pairs.sum()
    assert pairs[expected == 0].sum() == 0
    spread = (expected * (1 - expected) / total).sqrt()
    assert ((pairs / total - expected).abs() <= 5 * spread + 1e-9).all()


def test_rows_that_run_ahead_stay_in_their_room() -> None:
    model, draft = made("llama"), made("windowed")
    speculator = Speculator(model, draft, batch=3, capacity=20, ahead=3)
    for _ in speculate(speculator, PROMPTS, 11):
        assert int(speculator.target.cache.lengths_B.max()) <= 20


def test_pairs_that_cannot_be_are_refused() -> None:
    model = made("llama")
    with pytest.raises(InputError, match="draft knows 300 tokens and the model 512"):
        Speculator(model, GPT(GPTConfig(64, 300, 1, 2, 16)), batch=1, capacity=8)
    with pytest.raises(InputError, match="penalty do not go together"):
        Speculator(model, model, batch=1, capacity=8, sampling=Sampling(repetition_penalty=1.1))
    with pytest.raises(InputError, match="take 257 positions; the contexts are 256"):
        Speculator(model, model, batch=1, capacity=252)
    with pytest.raises(InputError, match="ahead is 0"):
        Speculator(model, model, batch=1, capacity=8, ahead=0)


@pytest.mark.gpu
def test_recorded_rounds_are_the_models_own_tokens() -> None:
    model, draft = made("wide").cuda(), made("windowed").cuda()
    expected = [recomputed(model, prompt, 130) for prompt in PROMPTS]
    for _ in range(2):
        assert generate(model, PROMPTS, 130, draft=draft, ahead=3) == expected
    sampling = Sampling(0.8, top_k=20)
    assert len(generate(model, PROMPTS, 30, draft=draft, sampling=sampling, seed=1)[1]) == 30
