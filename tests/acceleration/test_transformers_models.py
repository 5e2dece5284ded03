"""Models of transformers, small and with random weights: numbers, padding, and the way back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuseline.acceleration.handle import Acceleration

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("proofs_shared")]

Make = Callable[..., Acceleration]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(2)
    if name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    elif name == "gemma2":
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GROUPED, sliding_window=4))
    elif name == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    else:
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2, use_cache=False
        )
        model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def batch(padded: bool = False) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 64, (2, 9))
    given = {"input_ids": tokens, "labels": tokens}
    if padded:
        mask = torch.ones_like(tokens)
        mask[1, :4] = 0
        given["attention_mask"] = mask
    return given


KINDS = {
    "llama": {
        "embedding": 1,
        "rms_norm": 5,
        "attention": 2,
        "gated_mlp": 2,
        "residual_norm": 4,
        "rotary": 2,
    },
    "gemma2": {"embedding": 1, "rms_norm": 9, "gated_mlp": 2, "residual_norm": 4, "rotary": 2},
    "bert": {"embedding": 3, "layer_norm": 2, "attention": 2, "residual_norm": 4, "activation": 3},
    "gpt2": {"embedding": 2, "layer_norm": 5, "attention": 2, "mlp": 2, "residual_norm": 4},
}


@pytest.mark.parametrize("name", KINDS)
def test_outputs_gradients_padding_and_undo(name: str, keep_all: Make) -> None:
    model = make(name)
    plain = copy.deepcopy(model)
    fast = keep_all(model, batch())
    counts: dict[str, int] = {}
    for site in fast.kept:
        counts[site.kind] = counts.get(site.kind, 0) + 1
    assert counts == KINDS[name], fast
    for padded in (False, True):
        given = batch(padded)
        ours, theirs = model(**given), plain(**given)
        seen = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
        assert torch.allclose(ours.logits[seen], theirs.logits[seen], rtol=1e-4, atol=1e-4)
        pairs = zip(
            torch.autograd.grad(ours.loss, list(model.parameters()), allow_unused=True),
            torch.autograd.grad(theirs.loss, list(plain.parameters()), allow_unused=True),
            strict=True,
        )
        for one, other in pairs:
            assert (one is None) == (other is None)
            assert one is None or (one - other).norm() <= 1e-4 * other.norm() + 1e-6
    assert fast.report().declined == 0
    fast.undo()
    assert model.config._attn_implementation == plain.config._attn_implementation
    assert not any("forward" in vars(m) or "_fuseline_attention" in vars(m) for m in model.modules())
    given = batch(True)
    assert torch.equal(model(**given).logits, plain(**given).logits)


def test_generation_is_the_same_token_by_token(keep_all: Make) -> None:
    model = make("llama")
    prompt = torch.randint(1, 64, (2, 5))
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=True)
    keep_all(model, batch())
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=True), expected)


def test_a_model_that_shares_the_configuration_runs_what_it_did(keep_all: Make) -> None:
    model = make("llama")
    other = transformers.LlamaForCausalLM(model.config).eval()
    given = batch(True)
    expected = other(**given).logits
    keep_all(model, batch())
    assert torch.equal(other(**given).logits, expected)


def test_head_and_loss_of_a_causal_model(keep_all: Make) -> None:
    model, given = make("llama").train(), batch()
    fast = keep_all(model, given)
    assert [(s.path, s.status) for s in fast.sites if s.kind == "head_loss"] == [("lm_head", "found")]
    expected = model(**given).loss.item()
    step = fast.training_step(torch.optim.SGD(model.parameters(), lr=0.0), precision="fp32")
    assert step(given).item() == pytest.approx(expected, rel=1e-5)
    assert type(model(**given).logits) is torch.Tensor


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_step_asks_for_no_cache(name: str, keep_all: Make) -> None:
    """Same loss and gradients; a loss of one's own, and a batch that says so, get what the model returns."""
    model, given = make(name).train(), batch()
    model.config.use_cache = True
    for dropout in (m for m in model.modules() if isinstance(m, torch.nn.Dropout)):
        dropout.p = 0.0
    seen: list[bool] = []
    returned = model(**given)
    assert returned.past_key_values is not None, "the model makes a cache by itself"
    returned.loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    fast = keep_all(model, given)

    def look(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen.append(output.past_key_values is not None)

    model.register_forward_hook(look, with_kwargs=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = fast.training_step(optimizer, precision="fp32", grad_clip=0.0)
    seen.clear()
    loss = step(given)
    assert not any(seen)
    assert float(loss) == pytest.approx(float(returned.loss), rel=1e-5)
    for p, right in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, right, rtol=1e-3, atol=1e-5)
    step({**given, "use_cache": True})
    assert seen[-1], "a batch that asks for a cache gets one"
    own = fast.training_step(optimizer, precision="fp32", loss=lambda output, batch: output.loss)
    own(given)
    assert seen[-1], "a loss of one's own may look at the cache"
