"""The error a rung adds: none for fp32, bf16's for bf16, and a large one for a rung that is wrong."""

from __future__ import annotations

import pytest
import torch

from fuseline.bench.ladder.contender import GPTContender
from fuseline.bench.ladder.precision_check import errors, reference
from fuseline.models.gpt import GPT

CPU = torch.device("cpu")


def _batch(spec):
    tokens_BT = torch.randint(
        spec.vocab_size, (spec.batch, spec.seqlen + 1), generator=torch.Generator().manual_seed(1)
    )
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def _errors(spec, base, state):
    contender = GPTContender(spec, CPU, state)
    contender.warm_up(iter([_batch(spec)] * 4))
    found = errors(contender, reference(base, _batch(base), state))
    return found["loss_error"].value, found["grad_error"].value


def test_the_reference_is_the_loss_and_gradient_of_the_batch(base, state):
    truth = reference(base, _batch(base), state)
    model = GPT(base.config)
    state.fill(model)
    loss = model(*_batch(base))
    loss.backward()
    assert truth.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(truth.gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_going_through_the_batch_in_pieces_changes_nothing(base, state, monkeypatch):
    whole = reference(base, _batch(base), state)
    monkeypatch.setattr("fuseline.bench.ladder.precision_check.CHUNK_TOKENS", base.seqlen)
    pieces = reference(base, _batch(base), state)
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-6)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(pieces.gradients[name], gradient, rtol=1e-3, atol=1e-6)


def test_fp32_adds_next_to_nothing_with_padding_and_other_optimizers(base, state):
    spec = base.with_({"vocab_multiple": 64, "optimizer": "fused", "attention": "math"})
    loss_error, grad_error = _errors(spec, base, state)
    assert loss_error < 1e-6
    assert grad_error < 1e-5


def test_bf16_adds_what_eight_bits_add(base, state):
    loss_error, grad_error = _errors(base.with_({"precision": "bf16"}), base, state)
    assert loss_error < 1e-2
    assert 1e-4 < grad_error < 5e-2


def test_a_wrong_gradient_shows(base, state):
    contender = GPTContender(base, CPU, state)
    contender.model.transformer.h[0].mlp.c_proj.weight.register_hook(lambda grad: 1.5 * grad)
    contender.warm_up(iter([_batch(base)] * 4))
    found = errors(contender, reference(base, _batch(base), state))
    assert found["loss_error"].value < 1e-6
    assert found["grad_error"].value > 1e-2
