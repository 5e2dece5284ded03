from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseline.errors import InputError
from fuseline.generation.beam_search import beam_search, greedy_search
from fuseline.generation.kv_cache import KeyValueCache
from fuseline.generation.translation import translate_tokens
from fuseline.generation.writers import writer_of
from fuseline.models.encoder_decoder import EncoderDecoder
from fuseline.models.translation import DecoderOnly
from fuseline.models.translation_config import TranslationConfig

V, EOS, START = 11, 1, 3
KINDS = [DecoderOnly, EncoderDecoder]


def make(kind: Any, length: int = 16) -> Any:
    torch.manual_seed(5)
    config = TranslationConfig(
        vocab_size=V, num_layers=2, num_heads=2, embed_dim=16, ffn_dim=32, length=length, dropout=0.1
    )
    model = kind(config).eval()
    for parameter in model.parameters():
        parameter.data *= 1.5  # sharper than a fresh model
    return model


def logits_anew(model: Any, prompt: list[int], text: list[int]) -> Tensor:
    """Logits of the next token, all computed again without a cache."""
    if isinstance(model, EncoderDecoder):
        return model(torch.tensor([prompt]), torch.tensor([[START, *text]]))[0, -1]
    return model(torch.tensor([[*prompt, *text]]))[0, -1]


PROMPTS = [[2, 5, 6, 7, 3], [2, 8, 3], [2, 4, 9, 10, 3]]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_changes_no_logits(kind: Any) -> None:
    """Prompts of unequal length in one batch, picked over as a beam search does."""
    model = make(kind)
    writer = writer_of(model, PROMPTS, START)
    logits = writer.begin()
    texts: list[list[int]] = [[], [], []]
    rows = [0, 1, 2]
    for step, tokens in enumerate([(4, 5, 6), (7, 8, 9), (10, 4, 5), (6, 6, 6)]):
        for row in range(3):
            torch.testing.assert_close(
                logits[row], logits_anew(model, PROMPTS[rows[row]], texts[row]), rtol=1e-4, atol=1e-5
            )
        if step == 2:
            order = [2, 0, 2]
            writer.pick(torch.tensor(order))
            texts, rows = [list(texts[i]) for i in order], [rows[i] for i in order]
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        logits = writer.write(torch.tensor(tokens))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_takes_the_likeliest_token(kind: Any) -> None:
    model = make(kind)
    found = greedy_search(writer_of(model, PROMPTS, START), eos_id=EOS, max_new_tokens=6).tolist()
    for prompt, text in zip(PROMPTS, found, strict=True):
        expected: list[int] = []
        while len(expected) < len(text):
            done = EOS in expected
            expected.append(EOS if done else int(logits_anew(model, prompt, expected).argmax()))
        assert text == expected


class Chain:
    """Texts drawn from a table: the next token's probability depends on the last one."""

    room = 4

    def __init__(self, table: Tensor, sentences: int = 1) -> None:
        self.logs, self.sentences = table.log(), sentences

    def begin(self) -> Tensor:
        return self.logs[0].expand(self.sentences, -1)

    def write(self, tokens: Tensor) -> Tensor:
        return self.logs[tokens]

    def pick(self, rows: Tensor) -> None:
        """A table has no memory."""


def best_of_all(table: Tensor, length_penalty: float) -> list[int]:
    """By looking at every text of up to four tokens that ends."""
    logs, size = table.log(), table.shape[0]
    scored = []
    for length in range(1, Chain.room + 1):
        for body in itertools.product([t for t in range(size) if t != EOS], repeat=length - 1):
            text = [*body, EOS]
            score = sum(float(logs[a, b]) for a, b in itertools.pairwise([0, *text]))
            scored.append((score / ((5 + length) / 6) ** length_penalty, text))
    best = max(scored)[1]
    return best + [EOS] * (Chain.room - len(best))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
def test_a_wide_beam_finds_the_best_text_of_all(seed: int, length_penalty: float) -> None:
    table = torch.softmax(2 * torch.randn(5, 5, generator=torch.Generator().manual_seed(seed)), -1)
    found = beam_search(Chain(table), beams=200, eos_id=EOS, max_new_tokens=9, length_penalty=length_penalty)
    assert found[0].tolist() == best_of_all(table, length_penalty)[: found.shape[1]]


def test_a_beam_finds_what_greed_misses() -> None:
    table = torch.full((5, 5), 1e-6)
    table[0, 2], table[0, 3] = 0.6, 0.4
    table[2] = torch.tensor([0.3, 0.1, 0.2, 0.2, 0.2])
    table[3, EOS] = 0.9
    assert greedy_search(Chain(table), eos_id=EOS, max_new_tokens=4)[0, 0] == 2
    assert beam_search(Chain(table), beams=2, eos_id=EOS, max_new_tokens=4)[0, :2].tolist() == [3, EOS]


def test_a_batch_is_searched_as_each_of_it_alone() -> None:
    model = make(EncoderDecoder)
    prompts = [*PROMPTS, [2, 4, 1], [2, 5, 5, 5, 5, 1]]
    together = translate_tokens(model, prompts, start_id=START, eos_id=EOS, beams=3)
    alone = [translate_tokens(model, [p], start_id=START, eos_id=EOS, beams=3)[0] for p in prompts]
    assert [t[:8] for t in together] == [t[:8] for t in alone]


def test_a_text_that_does_not_end_is_cut() -> None:
    table = torch.full((5, 5), 0.0)
    table[:, 2] = 0.9
    table[:, 3] = 0.1
    found = beam_search(Chain(table), beams=2, eos_id=EOS, max_new_tokens=3)
    assert found[0].tolist() == [2, 2, 2]


def test_a_cache_keeps_what_it_is_given_and_no_more() -> None:
    cache = KeyValueCache(3)
    k = torch.randn(2, 1, 2, 4)
    cache.append(k, -k)
    cache.pick(torch.tensor([1, 1, 0]))
    new = torch.randn(3, 1, 1, 4)
    k_all, v_all = cache.append(new, new)
    assert torch.equal(k_all[0], torch.cat([k[1], new[0]], dim=1))
    assert torch.equal(v_all[2, :, :2], -k[0])
    with pytest.raises(InputError, match="room for 3"):
        cache.append(new, new)


def test_it_refuses_what_cannot_be() -> None:
    with pytest.raises(InputError, match="beams is 0"):
        beam_search(Chain(torch.ones(3, 3) / 3), beams=0, eos_id=EOS, max_new_tokens=3)
    with pytest.raises(InputError, match="no room"):
        greedy_search(writer_of(make(DecoderOnly, 4), PROMPTS, START), eos_id=EOS, max_new_tokens=3)
