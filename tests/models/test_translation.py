from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.errors import InputError
from fuseline.models.encoder_decoder import EncoderDecoder, sine_positions
from fuseline.models.translation import DecoderOnly
from fuseline.models.translation_config import TranslationConfig
from fuseline.models.translation_kernels import FORMULAS, FUSED, TORCH, Kernels
from fuseline.models.translation_layers import Chain

SMALL: dict[str, Any] = {
    "vocab_size": 23,
    "num_layers": 2,
    "num_heads": 2,
    "embed_dim": 16,
    "ffn_dim": 24,
    "length": 12,
    "dropout": 0.0,
}
WAYS = [{"fused": True}, {"fused": False}, {"fused": False, "unfused": "torch"}]
IDS = ["fused", "formulas", "torch"]


def make(kind: Callable[[TranslationConfig], nn.Module], **options: Any) -> Any:
    torch.manual_seed(0)
    model = kind(TranslationConfig(**{**SMALL, **options}))
    for parameter in model.parameters():  # norms and biases that differ from 1 and 0
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, SMALL["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def test_the_defaults_are_the_seeds() -> None:
    config = TranslationConfig(vocab_size=10_000)
    shape = (config.num_layers, config.embed_dim, config.num_heads, config.ffn_dim, config.length)
    assert shape == (4, 256, 8, 256, 40)
    assert (config.dropout, config.norm_first, config.architecture) == (0.1, True, "decoder-only")


@pytest.mark.parametrize("way", WAYS, ids=IDS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_later_token_changes_nothing_before_it(way: dict[str, Any], norm_first: bool) -> None:
    model = make(DecoderOnly, norm_first=norm_first, **way)
    first, second = tokens(2, 9), tokens(2, 9)
    second[:, 5:] = (second[:, 5:] + 3) % 20 + 1
    assert not torch.equal(first, second)
    assert torch.equal(model(first)[:, :5], model(second)[:, :5])
    assert not torch.equal(model(first)[:, 5:], model(second)[:, 5:])


@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_padding_at_the_end_changes_nothing(way: dict[str, Any]) -> None:
    model = make(DecoderOnly, **way)
    plain = tokens(2, 7)
    padded = torch.cat([plain, torch.zeros(2, 4, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(padded)[:, :7], model(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_padding_within_is_seen_by_none(way: dict[str, Any]) -> None:
    """What stands in a padded place (its token vector) must not reach any token."""
    model = make(DecoderOnly, **way)
    padded = tokens(2, 9)
    padded[:, 2] = 0
    others = [0, 1, *range(3, 9)]
    before = model(padded)[:, others]
    model.token_embedding.weight.data[0] += 5.0
    after = model(padded)[:, others]
    assert torch.equal(before, after)
    model.config = TranslationConfig(**{**SMALL, **way, "pad_id": 22})  # no longer padding: now it is seen
    assert not torch.equal(model(padded)[:, 3:], before[:, 2:])


@pytest.mark.parametrize("way", WAYS, ids=IDS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_decoder_sees_no_padding_and_no_later_token(way: dict[str, Any], norm_first: bool) -> None:
    model = make(EncoderDecoder, norm_first=norm_first, **way)
    source, target = tokens(2, 6), tokens(2, 7) % 20 + 1
    padded = torch.cat([source, torch.zeros(2, 3, dtype=torch.int64)], dim=1)
    later = target.clone()
    later[:, 4:] = later[:, 4:] % 20 + 1
    out = model(source, target)
    torch.testing.assert_close(model(padded, target), out, rtol=1e-5, atol=1e-6)
    assert torch.equal(model(source, later)[:, :4], out[:, :4])
    assert not torch.equal(model(source, later)[:, 4:], out[:, 4:])
    other = source.clone()
    other[:, -1] = other[:, -1] % 20 + 1
    assert not torch.equal(model(other, target)[:, 0], out[:, 0])  # but all of the source


@pytest.mark.parametrize("kind", [DecoderOnly, EncoderDecoder])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_fused_and_unfused_learn_the_same(kind: Any, smoothing: float) -> None:
    curves = []
    for way in WAYS:
        model = make(kind, label_smoothing=smoothing, **way)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        batch = [tokens(4, 10) for _ in range(2 if kind is EncoderDecoder else 1)]
        batch[-1][:, 8:] = 0
        targets = torch.where(batch[-1] == 0, -1, batch[-1])
        losses = []
        for _ in range(15):
            loss = model(*batch, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0][-1] < curves[0][0] - 0.5
    torch.testing.assert_close(curves[0], curves[1], rtol=2e-4, atol=0.0)
    torch.testing.assert_close(curves[2], curves[1], rtol=2e-4, atol=0.0)


@pytest.mark.parametrize("kernels", [FORMULAS, TORCH, FUSED], ids=["formulas", "torch", "fused"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_stream_keeps_its_precision_under_autocast(kernels: Kernels, norm_first: bool) -> None:
    chain = Chain(TranslationConfig(**{**SMALL, "norm_first": norm_first}), kernels, branches=2)
    embedded, bias = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(16)
    weight = torch.eye(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x, stream = chain.begin(embedded)
        first = stream
        for branch in range(2):
            x, stream = chain.add(branch, torch.nn.functional.linear(x, weight), bias, stream)
    assert stream.dtype is torch.float32
    if norm_first:  # to 8 bits only what was added was rounded
        wide = chain.begin(embedded)[0]
        normed = torch.nn.functional.layer_norm(first + wide, (16,))
        torch.testing.assert_close(stream, first + wide + normed, rtol=0, atol=0.03)


@pytest.mark.parametrize("kernels", [FORMULAS, FUSED], ids=["formulas", "fused"])
def test_the_kernels_agree_with_torchs(kernels: Kernels) -> None:
    torch.manual_seed(3)
    x, stream, weight, bias, x_bias = (torch.randn(*s) for s in ((5, 16), (5, 16), (16,), (16,), (16,)))
    for ours, theirs in zip(
        kernels.add_norm(x, x_bias, stream, weight, bias, 0.0),
        TORCH.add_norm(x, x_bias, stream, weight, bias, 0.0),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(kernels.norm(x, weight, bias), TORCH.norm(x, weight, bias))
    torch.testing.assert_close(kernels.activation(x, x_bias), TORCH.activation(x, x_bias))
    targets = torch.tensor([1, -1, 3, 15, 0])
    for smoothing in (0.0, 0.2):
        torch.testing.assert_close(
            kernels.loss(x, targets, smoothing), TORCH.loss(x, targets, smoothing), rtol=1e-5, atol=1e-6
        )
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8)
    keep = torch.rand(2, 1, 1, 6) < 0.7
    keep[..., 0] = True
    for causal in (False, True):
        torch.testing.assert_close(
            kernels.attention(q, k, v, causal, keep, 0.0), TORCH.attention(q, k, v, causal, keep, 0.0)
        )


@pytest.mark.parametrize("kernels", [FORMULAS, TORCH, FUSED], ids=["formulas", "torch", "fused"])
def test_dropout_drops_its_share_and_keeps_the_mean(kernels: Kernels) -> None:
    torch.manual_seed(4)
    ones, zeros = torch.ones(400, 64), torch.zeros(64)
    _, total = kernels.add_norm(ones, zeros, torch.zeros(400, 64), torch.ones(64), zeros, 0.25)
    kept = total[total != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 4 / 3))
    assert (total == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    embedded = kernels.embed(
        torch.zeros(2, 50, dtype=torch.int64), torch.ones(3, 64), torch.zeros(50, 64), None, 0.25
    )
    assert (embedded == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    # Each query's weights are those of 64 equal keys, and each value tells of one key.
    equal, values = torch.zeros(1, 8, 64, 64), torch.eye(64).expand(1, 8, 64, 64)
    weights = kernels.attention(equal, equal, values, False, None, 0.25) * 64
    torch.testing.assert_close(weights[weights != 0], torch.full_like(weights[weights != 0], 4 / 3))
    assert (weights == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)


def test_a_tied_head_shares_the_token_vectors() -> None:
    tied, untied = make(EncoderDecoder, tied=True), make(EncoderDecoder)
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.num_parameters() - tied.num_parameters() == 23 * 16


def test_positions_are_the_papers() -> None:
    rows = sine_positions(50, 8)
    assert rows[7, 2].item() == pytest.approx(torch.sin(torch.tensor(7 / 10000 ** (2 / 8))).item(), rel=1e-5)
    assert rows[7, 3].item() == pytest.approx(torch.cos(torch.tensor(7 / 10000 ** (2 / 8))).item(), rel=1e-5)


def test_it_refuses_what_cannot_be() -> None:
    with pytest.raises(InputError, match="13 tokens"):
        make(DecoderOnly)(tokens(1, 13))
    with pytest.raises(InputError, match="13 tokens"):
        make(EncoderDecoder)(tokens(1, 13), tokens(1, 2))
    for wrong in (
        {"num_heads": 3},
        {"dropout": 1.0},
        {"architecture": "rnn"},
        {"unfused": "slow"},
        {"pad_id": 23},
    ):
        with pytest.raises(InputError):
            TranslationConfig(**{**SMALL, **wrong})
