"""`generate` of live transformers decoders: the model's own tokens, and its own `generate` for all else."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fuseline
from fuseline.errors import InputError

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 96,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 211, "n_positions": 96}
END, PAD = 7, 3


def decoder(kind: str) -> Any:
    ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    if kind == "GPT2":
        config = transformers.GPT2Config(**GPT2, **ends)
        return transformers.GPT2LMHeadModel(config).eval()
    more = {"head_dim": 16} if kind == "Qwen3" else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more, **ends)
    config.tie_word_embeddings = kind == "Qwen2"
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def prompts(device: str = "cpu") -> dict[str, torch.Tensor]:
    tokens_BT = torch.randint(10, 211, (3, 9), device=device)
    mask_BT = torch.ones_like(tokens_BT)
    for row, pads in enumerate((0, 4, 8)):
        tokens_BT[row, :pads], mask_BT[row, :pads] = PAD, 0
    return {"input_ids": tokens_BT, "attention_mask": mask_BT}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "GPT2"])
def test_greedy_tokens_are_the_models_own(kind: str, device: str) -> None:
    model, batch = decoder(kind).to(device), prompts(device)
    expected = model.generate(**batch, max_new_tokens=40, do_sample=False)
    fast = fuseline.accelerate_generate(model)
    assert torch.equal(model.generate(**batch, max_new_tokens=40, do_sample=False), expected)
    assert (fast.reason, fast.calls) == ("", 1)
    single = {"inputs": batch["input_ids"][:1], "max_length": 30}
    assert torch.equal(model.generate(**single), fast._own(**single))
    assert (fast.reason, fast.calls) == ("", 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    expected = fast._own(**batch, max_new_tokens=12, repetition_penalty=1.3)
    assert torch.equal(model.generate(**batch, max_new_tokens=12, repetition_penalty=1.3), expected)
    fast.undo()
    assert "generate" not in model.__dict__
    assert torch.equal(model.generate(**batch, max_new_tokens=12, repetition_penalty=1.3), expected)


def test_rows_end_where_the_model_ends_them() -> None:
    model, batch = decoder("Llama"), prompts()
    plain = model.generate(**batch, max_new_tokens=30, eos_token_id=[])
    ends = [int(plain[0, 12]), int(plain[1, 20]), int(plain[2, 15])]
    expected = model.generate(**batch, max_new_tokens=30, eos_token_id=ends)
    assert expected.shape[1] < 39  # all had ended by then
    fast = fuseline.accelerate_generate(model)
    assert torch.equal(model.generate(**batch, max_new_tokens=30, eos_token_id=ends), expected)
    assert fast.calls == 1


def test_draws_follow_the_probabilities_and_torchs_seed() -> None:
    model = decoder("Llama")
    fuseline.accelerate_generate(model)
    tokens_BT = torch.randint(10, 211, (1, 5)).expand(512, 5)
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": True, "top_k": 3, "temperature": 0.7}
    torch.manual_seed(5)
    drawn = model.generate(tokens_BT, **options)[:, -1]
    torch.manual_seed(5)
    assert torch.equal(model.generate(tokens_BT, **options)[:, -1], drawn)
    assert not torch.equal(model.generate(tokens_BT, **options)[:, -1], drawn)
    with torch.no_grad():
        likeliest = (model(tokens_BT[:1]).logits[0, -1] / 0.7).topk(3)
    shares = torch.softmax(likeliest.values, -1)
    counts = torch.stack([(drawn == token).sum() for token in likeliest.indices])
    assert counts.sum() == 512
    assert torch.allclose(counts / 512, shares, atol=0.1)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"num_beams": 2}, "num_beams"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"max_new_tokens": 90}, "context has 96 positions"),
    ],
)
def test_what_is_not_done_here_is_the_models_own(options: dict[str, Any], reason: str) -> None:
    model, batch = decoder("Llama"), prompts()
    options = {"max_new_tokens": 5, "do_sample": False, **options}
    expected = model.generate(**batch, **options)
    fast = fuseline.accelerate_generate(model)
    found = model.generate(**batch, **options)
    assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected))
    assert reason in fast.reason
    assert (fast.calls, sum(fast.declined.values())) == (0, 1)


def changed_forward(model: Any) -> None:
    layer = model.model.layers[0].mlp
    plain = layer.forward
    layer.forward = lambda x: 1.1 * plain(x)


def adapted(model: Any) -> None:
    model.model.layers[0].mlp.adapter = nn.Linear(4, 4).eval()


@pytest.mark.parametrize(
    "change, reason",
    [
        (changed_forward, "something else than its config says"),
        (adapted, "does not hold the weights its config describes"),
        (lambda model: model.train(), "training mode"),
        (lambda model: model.lm_head.register_forward_hook(lambda *_: None), "has hooks"),
    ],
)
def test_a_model_that_is_not_what_its_config_says_is_left_alone(
    change: Callable[[Any], Any], reason: str
) -> None:
    model, batch = decoder("Llama"), prompts()
    change(model)
    expected = model.generate(**batch, max_new_tokens=5, do_sample=False)
    fast = fuseline.accelerate_generate(model)
    assert torch.equal(model.generate(**batch, max_new_tokens=5, do_sample=False), expected)
    assert reason in fast.reason


def test_models_of_other_kinds() -> None:
    with pytest.raises(InputError, match="has no generate"):
        fuseline.accelerate_generate(nn.Linear(2, 2))
    config = transformers.OPTConfig(
        vocab_size=50, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.OPTForCausalLM(copy.deepcopy(config)).eval()
    fast = fuseline.accelerate_generate(model)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    assert "not a decoder that Fuseline has a model for" in fast.reason


def halved(model: Any) -> None:
    for weight in model.parameters():
        weight.data.mul_(0.5)  # leaves no trace but the values
    model.lm_head.weight.data.mul_(-1)


def rescaled(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


def another_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh()


def wrapped(model: Any) -> None:
    own = model.forward

    def forward(*args: Any, **options: Any) -> Any:
        result = own(*args, **options)
        result.logits = -result.logits
        return result

    model.forward = forward


@pytest.mark.parametrize("change", [halved, rescaled, another_activation, wrapped])
@pytest.mark.parametrize("length", [1, 7])
def test_changes_after_the_first_call_are_seen(change: Callable[[Any], None], length: int) -> None:
    model = decoder("Llama")
    tokens_BT = torch.randint(10, 211, (2, length))
    fast = fuseline.accelerate_generate(model)
    model.generate(tokens_BT, max_new_tokens=3, do_sample=False)
    change(model)
    found = model.generate(tokens_BT, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, fast._own(tokens_BT, max_new_tokens=12, do_sample=False))


def test_threads_have_their_own_tokens() -> None:
    model = decoder("Llama")
    batches = [torch.randint(10, 211, (2, 7)) for _ in range(4)]
    expected = [model.generate(tokens, max_new_tokens=20, do_sample=False) for tokens in batches]
    fuseline.accelerate_generate(model)
    found: list[Any] = [None] * 4

    def run(number: int) -> None:
        found[number] = model.generate(batches[number], max_new_tokens=20, do_sample=False)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_arguments_in_odd_ways() -> None:
    model, tokens_BT = decoder("Llama"), torch.randint(10, 211, (2, 7))
    plain = model.generate(tokens_BT, max_new_tokens=8, eos_token_id=[])
    ends = [int(plain[1, 12]), int(plain[0, 9])]
    model.generation_config.pad_token_id = None
    fast = fuseline.accelerate_generate(model)
    for options in ({"eos_token_id": ends}, {"temperature": None, "repetition_penalty": None}):
        expected = fast._own(tokens_BT, max_new_tokens=8, **options)
        assert torch.equal(model.generate(tokens_BT, max_new_tokens=8, **options), expected)
        assert fast.reason == ""
    with torch.inference_mode():
        model.generate(tokens_BT, max_new_tokens=8)
    model.generate(tokens_BT, max_new_tokens=8)
    assert fast.calls == 4
    model.generate(tokens_BT, model.generation_config, None, max_new_tokens=8)
    assert "by position" in fast.reason
    twin = copy.deepcopy(model)
    expected = fast._own(tokens_BT, max_new_tokens=8)
    assert torch.equal(twin.generate(tokens_BT, max_new_tokens=8), expected)


def test_a_generate_of_the_users_own_comes_back() -> None:
    model = decoder("Llama")
    mine = model.__dict__["generate"] = lambda *_, **__: "mine"
    fast = fuseline.accelerate_generate(model)
    fast.undo()
    assert model.generate is mine
