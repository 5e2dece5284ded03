"""Generation with a cache: the tokens of a full recompute, in batches of unequal prompts, sampled or not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from fuseline.errors import InputError
from fuseline.generation.choice import Sampling
from fuseline.generation.decoder import Decoder
from fuseline.generation.generate import generate, stream
from fuseline.generation.static_cache import CacheShape, StaticCache
from fuseline.models.gpt import GPT
from fuseline.models.llama import Llama
from fuseline.models.llama_hugging_face import save_llama
from fuseline.ops.decode_attention import quantized

from .conftest import MODELS, PROMPTS, made, recomputed

SAMPLING = Sampling(0.8, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2)


def test_greedy_is_the_full_recompute(model: GPT | Llama) -> None:
    assert generate(model, PROMPTS, 40) == [recomputed(model, prompt, 40) for prompt in PROMPTS]


def test_greedy_is_that_of_transformers(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="needs transformers to compare with")
        model = made("llama")
        assert isinstance(model, Llama)
        save_llama(model, tmp_path)
        theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
        for prompt in PROMPTS:
            tokens = torch.tensor([prompt])
            out = theirs.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=30,
                do_sample=False,
                pad_token_id=0,
            )
            assert generate(model, [prompt], 30)[0] == out[0, len(prompt) :].tolist()


def test_past_a_bucket_and_with_prompts_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")
    expected = [recomputed(model, prompt, 10) for prompt in [list(range(1, 125)), [3] * 120]]
    monkeypatch.setattr("fuseline.generation.decoder.PROMPT_TOKENS", 130)
    assert generate(model, [list(range(1, 125)), [3] * 120], 10) == expected


def test_a_decoder_serves_one_batch_after_another() -> None:
    model = made("gpt")
    decoder = Decoder(model, batch=1, capacity=64)
    for prompt in ([9, 8, 7, 6], [1], [2, 3]):
        tokens = [step[0] for step in stream(decoder, [prompt], 12)]
        assert tokens == recomputed(model, prompt, 12)
    with pytest.raises(InputError, match="64 positions are full"):
        list(stream(decoder, [[1] * 60], 10))


def test_draws_repeat_with_their_seed() -> None:
    model = made("llama")
    first, again, other = (generate(model, PROMPTS, 12, sampling=SAMPLING, seed=s) for s in (3, 3, 4))
    assert first == again
    assert first != other


def test_repetition_penalty_counts_prompt_and_own_tokens() -> None:
    model = made("gpt")
    sampling = Sampling(0.0, repetition_penalty=1e9)
    for prompt, tokens in zip(PROMPTS, generate(model, PROMPTS, 30, sampling=sampling), strict=True):
        assert len(set(tokens)) == 30
        assert not set(tokens) & set(prompt)


def test_rows_stop_where_they_are_told() -> None:
    model = made("llama")
    whole = generate(model, PROMPTS, 20)
    stop = whole[0][5]
    ended = generate(model, PROMPTS, 20, stop_ids=[stop])
    for row, tokens in enumerate(ended):
        assert tokens == (whole[row][: whole[row].index(stop)] if stop in whole[row] else whole[row])
    lengths = [3, 1, 7]
    ended = generate(model, PROMPTS, 20, stopped=lambda row, tokens: len(tokens) == lengths[row])
    assert ended == [tokens[:n] for tokens, n in zip(whole, lengths, strict=True)]


@pytest.mark.parametrize("storage,bound", [("int8", 0.008), ("fp8", 0.04)])
def test_small_caches_err_little(storage: str, bound: float) -> None:
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0] = 0
    held, scales = quantized(x, {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[storage])
    error = (held.float() * scales.unsqueeze(-1) - x).norm() / x.norm()
    assert 0 < error < bound
    model = made("llama")
    logits = {}
    for kind in ("model", storage):
        decoder = Decoder(model, batch=3, capacity=32, storage=kind)
        decoder.begin(PROMPTS)
        decoder.tokens_B.fill_(4)
        hidden = []
        inner = model.logits
        model.logits = lambda x, kept=hidden, inner=inner: kept.append(inner(x)) or kept[-1]  # type: ignore
        decoder.advance()
        del model.logits
        logits[kind] = hidden[0]
    error = (logits[storage] - logits["model"]).norm() / logits["model"].norm()
    assert 0 < error < 10 * bound


def test_the_cache_counts_its_bytes() -> None:
    for storage in ("model", "int8", "fp8"):
        shape = CacheShape(2, 3, 8, 4, 50, 16, torch.bfloat16, storage)
        cache = StaticCache(shape, torch.device("cpu"))
        held = [cache.k, cache.v, cache.k_scales, cache.v_scales]
        assert shape.bytes == sum(t.nbytes for t in held if t is not None)


@pytest.mark.parametrize(
    "prompts,count,message",
    [
        ([], 1, "There is no prompt"),
        ([[1], []], 1, "Prompt 2 is empty"),
        ([[1, 512]], 1, r"ids from 1 to 512, and the model knows 0\.\.511"),
        ([[-1]], 1, "ids from -1"),
        ([[1] * 257], 1, "257 tokens, and the model's context is 256"),
        ([[1] * 250], 7, "leaves 6 of the model's context of 256; 7 new ones"),
        ([[1]], -1, "max_new_tokens is -1"),
    ],
)
def test_bad_prompts_are_refused(prompts: list[list[int]], count: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(made("llama"), prompts, count)


def test_decoders_that_cannot_be_are_refused() -> None:
    model = made("llama")
    assert generate(model, [[1]], 0) == [[]]
    with pytest.raises(InputError, match="257 positions, and the model's context is 256"):
        Decoder(model, batch=1, capacity=257)
    with pytest.raises(InputError, match="Did you mean 'int8'"):
        Decoder(model, batch=1, capacity=8, storage="int9")
    with pytest.raises(InputError, match="0 rows"):
        Decoder(model, batch=0, capacity=8)
    with pytest.raises(InputError, match="serves 2 prompts at once, and 1"):
        Decoder(model, batch=2, capacity=8).begin([[1]])
    with pytest.raises(InputError, match="Prompt 1 has 9 tokens, and there is room for 8"):
        Decoder(model, batch=1, capacity=8).begin([[1] * 9])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*MODELS, "wide", "wide-gpt"])
def test_recorded_steps_are_the_eager_ones_token_for_token(name: str) -> None:
    model = made(name).cuda()
    expected = [recomputed(model, prompt, 140) for prompt in PROMPTS]
    for graphs in (False, True):
        assert generate(model, PROMPTS, 140, graphs=graphs) == expected
    draws = [generate(model, PROMPTS, 40, sampling=SAMPLING, seed=5) for _ in range(2)]
    assert draws[0] == draws[1]


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_small_caches_on_the_gpu(storage: str) -> None:
    model = made("llama")
    expected = generate(model, PROMPTS, 4, storage=storage)
    assert generate(model.cuda(), PROMPTS, 4, storage=storage) == expected
    model = made("wide").to("cuda", torch.bfloat16)
    assert len(generate(model, PROMPTS, 40, storage=storage)[2]) == 40
