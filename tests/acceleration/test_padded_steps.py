"""Steps and calls with batches of many lengths: few recordings, and the numbers of a plain loop."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.acceleration.compiled_call import CompiledCall
from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.training_step import MOST_GRAPHS, TrainingStep

from .padded_models import VOCABULARY, Reader, batch_of, make_step, recorded_on_a_cpu

DROPS_NOTHING = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "pad_token_id": 0}


def model_of(name: str, positions: int = 256) -> nn.Module:
    """A small model with random weights that drops nothing, in training."""
    if name == "reader":
        return Reader(positions=positions)
    transformers = pytest.importorskip("transformers")
    if name == "bert":
        config = transformers.BertConfig(**SIZES, **DROPS_NOTHING, max_position_embeddings=positions)
        model = transformers.BertForMaskedLM(config)
    elif name == "roberta":
        sizes = {**SIZES, "pad_token_id": 1}
        options = {"max_position_embeddings": positions + 2, "num_labels": VOCABULARY}
        config = transformers.RobertaConfig(**sizes, **DROPS_NOTHING, **options)
        model = transformers.RobertaForTokenClassification(config)
    elif name == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": positions}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**sizes, **drops, bos_token_id=1, eos_token_id=2)
        )
    else:
        sizes = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": positions}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return model.train()


def plain_losses(model: nn.Module, groups: list[tuple[dict[str, Any], ...]], lr: float = 1e-2) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=lr), []
    for group in groups:
        optimizer.zero_grad()
        found = [model(**batch)["loss"] / len(group) for batch in group]
        torch.stack(found).sum().backward()
        optimizer.step()
        losses.append(sum(loss.item() for loss in found))
    return losses


def lengths_of(count: int, shortest: int = 40, longest: int = 128) -> list[int]:
    draw = random.Random(4)
    return [draw.randint(shortest, longest) for _ in range(count)]


def check(model: nn.Module, step: TrainingStep, batches: list[dict[str, Any]], expected: list[float]) -> None:
    """Every step was recorded, most with padding, and gave the loss of a plain loop."""
    losses = [float(step(batch)) for batch in batches]
    assert losses == pytest.approx(expected, rel=2e-3)
    assert step.execution == "recorded", step.reason
    assert not step.eager_steps, step.lengths.why
    assert step.lengths.counts["padded"] >= len(batches) // 2
    assert step.lengths.counts["added"] <= 0.25 * step.lengths.counts["given"]


@pytest.mark.parametrize("name", ["reader", "bert", "roberta", "gpt2", "llama"])
@pytest.mark.parametrize("left", [False, True])
def test_losses_and_weights_are_those_of_a_plain_loop(name: str, left: bool) -> None:
    model, batches = model_of(name), [batch_of(length, left=left) for length in lengths_of(8)]
    plain = copy.deepcopy(model)
    expected = plain_losses(plain, [(batch,) for batch in batches])
    with recorded_on_a_cpu() as made:
        check(model, make_step(model), batches, expected)
    assert len(made) <= 4
    assert len(made) == len(set(made))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_model_that_drops_and_runs_our_ops(name: str, keep_all: Any) -> None:
    """The proof runs the model's own code and ours, and none of ours is left out for it."""
    model = model_of(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    fast = keep_all(model, batch_of(40), strict=True)
    taken = fast.report().taken
    with recorded_on_a_cpu() as made:
        step = fast.training_step(torch.optim.AdamW(model.parameters()), "fp32")
        losses = [float(step(batch_of(length))) for length in (40, 63, 60)]
    assert made == [40, 64], step.lengths.why
    assert all(2 < loss < 8 for loss in losses)
    assert fast.report().taken > taken
    assert fast.report().declined == 0
    assert all(module.training for module in model.modules())


def test_batches_of_one_length_are_never_padded() -> None:
    model = Reader()
    with recorded_on_a_cpu() as made:
        step = make_step(model)
        for full in (True, False, True):
            step(batch_of(50, full=full))
    assert set(made) == {50}
    assert not step.lengths.counts


@pytest.mark.parametrize("name", ["bert", "gpt2", "reader"])
def test_no_length_is_above_the_longest_that_a_model_can_take(name: str) -> None:
    model, batches = model_of(name, positions=100), [batch_of(length) for length in (60, 98, 99, 40)]
    expected = plain_losses(copy.deepcopy(model), [(batch,) for batch in batches])
    with recorded_on_a_cpu() as made:
        step = make_step(model)
        losses = [float(step(batch)) for batch in batches]
    assert losses == pytest.approx(expected, rel=1e-3)
    # The Reader has no configuration that says it: only trying shows that it cannot run with 128 positions.
    assert made == ([60, 98, 99, 60] if name == "reader" else [60, 100, 60])[: len(made)]
    assert step.lengths.counts["padded"] == (1 if name == "reader" else 3)


def test_positions_types_and_a_class_for_each_row() -> None:
    model = Reader()
    batches = []
    for length in lengths_of(8):
        places = torch.arange(3, 3 + length).expand(3, -1)
        types = torch.randint(2, (3, length))
        batches.append({**batch_of(length), "position_ids": places, "token_type_ids": types})
    for length in lengths_of(8):
        batches.append({**batch_of(length), "labels": torch.randint(VOCABULARY, (3,))})
    expected = plain_losses(copy.deepcopy(model), [(batch,) for batch in batches])
    with recorded_on_a_cpu() as made:
        check(model, make_step(model), batches, expected)
    assert len(made) <= MOST_GRAPHS


def test_micro_batches_of_a_step_share_a_length() -> None:
    model, drawn = Reader(), [batch_of(length) for length in lengths_of(16, 50, 60)]
    groups = list(zip(drawn[::2], drawn[1::2], strict=True))
    expected = plain_losses(copy.deepcopy(model), groups)  # type: ignore[arg-type]
    with recorded_on_a_cpu() as made:
        step = make_step(model, accumulation=2)
        losses = [float(step(*group)) for group in groups]
    assert losses == pytest.approx(expected, rel=1e-3)
    assert made == [64]
    assert step.lengths.counts["given"] == sum(batch["labels"].numel() for batch in drawn)


def test_a_loss_of_ones_own_is_proved_like_any() -> None:
    def mean_of_seen(output: Any, batch: Any) -> torch.Tensor:
        seen = batch["attention_mask"].unsqueeze(-1)
        return (output["logits"].square() * seen).sum() / seen.sum()

    def mean_of_all(output: Any, batch: Any) -> torch.Tensor:
        return output["logits"].square().mean()

    batches = [batch_of(length) for length in (40, 50, 55)]
    for loss, reason in ((mean_of_seen, ""), (mean_of_all, "its mask does not hide")):
        with recorded_on_a_cpu() as made:
            step = make_step(Reader(), loss=loss)
            for batch in batches:
                step(batch)
        assert reason in step.lengths.reason
        assert made == ([40, 50, 55] if reason else [40, 64])


def test_what_is_not_padded_runs_as_it_came() -> None:
    model = Reader(heeds=False)
    batches = [batch_of(length) for length in range(30, 30 + MOST_GRAPHS + 2)]
    expected = plain_losses(copy.deepcopy(model), [(batch,) for batch in batches])
    with recorded_on_a_cpu() as made:
        step = make_step(model)
        losses = [float(step(batch)) for batch in batches]
    assert losses == pytest.approx(expected, rel=1e-3)
    assert made == list(range(30, 30 + MOST_GRAPHS))
    ((reason, count),) = step.eager_steps.items()
    assert "not padded: padding changes its loss and gradients by" in reason
    assert count == 2


def test_weights_of_16_bits_are_proved_in_32_and_stay_where_they_are() -> None:
    for heeds in (True, False):
        model = Reader(heeds=heeds).bfloat16()
        places = [parameter.data_ptr() for parameter in model.parameters()]
        with recorded_on_a_cpu() as made:
            step = make_step(model, "bf16")
            for length in (40, 63):
                step(batch_of(length, full=True))
        assert made == [40, 64 if heeds else 63], step.lengths.why
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_report_says_what_was_padded_and_why_not() -> None:
    with recorded_on_a_cpu():
        fast = Acceleration(Reader())
        step = fast.training_step(torch.optim.AdamW(fast.model.parameters()), "fp32", pad=True)
        off = fast.training_step(torch.optim.AdamW(fast.model.parameters()), "fp32", pad=False)
        for length in (40, 60, 62):
            step(batch_of(length, rows=2))
            off(batch_of(length, rows=2))
    assert fast.report().padded == {"padded": 2, "given": 244, "added": 12}
    assert "2 steps and compiled calls were padded to a recorded length, which added 4.9%" in str(
        fast.report()
    )
    assert fast.report().unpadded == ("padding is switched off",)
    assert "No batch is padded: padding is switched off" in str(fast.report())


def called(model: nn.Module, **options: Any) -> CompiledCall:
    call = CompiledCall(model, **options)
    call._never = ""  # as on a GPU
    return call


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["reader", "bert", "roberta", "gpt2", "llama"])
def test_outputs_of_a_call_are_those_of_the_model(name: str, left: bool) -> None:
    model = model_of(name).eval()
    options = {} if name == "reader" else {"use_cache": False} if name in ("gpt2", "llama") else {}
    with recorded_on_a_cpu() as made:
        call = called(model)
        for length in lengths_of(6):
            batch = {**batch_of(length, left=left), **options}
            found, wanted = call(**batch), model(**batch)
            assert list(found) == list(wanted)
            for key, value in wanted.items():
                torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)
                assert found[key].is_contiguous()
    assert call.lengths.counts["padded"] >= 3, call.lengths.why
    assert not call.eager_calls
    assert len(made) <= 4


def test_outputs_are_cut_in_every_dimension_that_grew() -> None:
    pytest.importorskip("transformers")
    model = model_of("bert").eval()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    asks = {"output_attentions": True, "output_hidden_states": True}
    with recorded_on_a_cpu():
        call = called(model)
        for length in (40, 50, 64, 61):
            batch = {**batch_of(length, rows=2), **asks}
            found, wanted = call(**batch), model(**batch)
            assert found.attentions[0].shape == (2, 4, length, length)
            assert torch.allclose(found.attentions[1], wanted.attentions[1], atol=1e-5)
            assert torch.allclose(found.hidden_states[0], wanted.hidden_states[0], atol=1e-5)
    assert call.lengths.counts["padded"] == 2


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: Reader(heeds=False), "padding changes its outputs by"),
        (lambda: Strided(), "changes the shape of an output"),
        (lambda: Measured(), "padding changes an output from 50 to 64"),
    ],
)
def test_calls_whose_outputs_change_are_not_padded(make: Any, reason: str) -> None:
    model = make().eval()
    with recorded_on_a_cpu() as made:
        call = called(model)
        for length in (40, 50, 60):
            batch = batch_of(length)
            found, wanted = call(**batch), model(**batch)
            assert torch.allclose(found["logits"], wanted["logits"], atol=1e-5)
    assert reason.replace("50", "25").replace("64", "64") in call.lengths.reason
    assert made == [40, 50, 60]


class Strided(Reader):
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"logits": super().forward(*args, **kwargs)["logits"][:, ::2]}


class Measured(Reader):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits = super().forward(*args, **kwargs)["logits"]
        return {"logits": logits, "positions": logits.shape[1]}


def test_calls_are_not_padded_where_nobody_wants_it() -> None:
    model = Reader().eval()
    with recorded_on_a_cpu() as made:
        fast = Acceleration(model, pad_calls=False)
        call = called(model, pad=fast.pad_calls)
        for length in (40, 50):
            call(**batch_of(length))
        named = called(model)
        for length in (40, 50):
            batch = batch_of(length)
            named(batch.pop("input_ids"), **batch)
    assert made == [40, 50, 40, 50]
    assert "without the names" in named.lengths.why


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["reader", "bert", "gpt2", "llama"])
def test_thirty_lengths_take_few_graphs(name: str, precision: str) -> None:
    model = model_of(name).cuda()
    plain = copy.deepcopy(model)
    batches = [{n: t.cuda() for n, t in batch_of(length).items()} for length in lengths_of(30)]
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        expected = plain_losses(plain, [(batch,) for batch in batches], lr=1e-3)
    fast = Acceleration(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = fast.training_step(optimizer, precision=precision, grad_clip=0.0, compiled=False)
    losses = [float(step(batch)) for batch in batches]
    assert step.execution == "recorded", step.reason
    assert not step.eager_steps, step.lengths.why
    assert step._graph is not None
    assert len(step._graph) <= 6
    assert step.lengths.counts["padded"] >= 20
    assert losses == pytest.approx(expected, rel=2e-3 if precision == "fp32" else 0.05)
    step.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_calls_of_thirty_lengths_take_few_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name).cuda().eval()
    fast = Acceleration(model)
    monkeypatch.setattr(fast, "_compiled_forms", lambda **_: [])
    for length in lengths_of(30):
        batch = {n: t.cuda() for n, t in batch_of(length).items()} | {"use_cache": False}
        found, wanted = fast.compiled_call(**batch), model(**batch)
        assert found.logits.is_contiguous()
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-3, atol=1e-3)
    call = fast._call
    assert call is not None
    assert not call.eager_calls
    assert len(call._graph) <= 6
    assert call.lengths.counts["padded"] >= 20


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_what_can_be_seen_of_rows_padded_on_the_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of attention that sees nothing may hold anything, whether the call is padded or not."""
    model = model_of(name).cuda().eval()
    fast = Acceleration(model)
    monkeypatch.setattr(fast, "_compiled_forms", lambda **_: [])
    for length in lengths_of(8):
        batch = {n: t.cuda() for n, t in batch_of(length, left=True).items()} | {"use_cache": False}
        seen = batch["attention_mask"].bool()
        found, wanted = fast.compiled_call(**batch), model(**batch)
        torch.testing.assert_close(found.logits[seen], wanted.logits[seen], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["has no label that is ignored", "embeds its labels", "has too few positions"]
)
def test_an_index_outside_of_its_table_leaves_the_gpu_alive(name: str) -> None:
    from .test_padding import TRAPS

    model = Reader(**TRAPS[name][0]).cuda().train()
    step = Acceleration(model).training_step(torch.optim.AdamW(model.parameters()), "fp32", compiled=False)
    for length in (40, 63, 62):
        step({n: t.cuda() for n, t in batch_of(length, full=True).items()})
    torch.cuda.synchronize()
    assert "could not run with 64 positions" in step.lengths.why
    assert step.execution == "recorded"
