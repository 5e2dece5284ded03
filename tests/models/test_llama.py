"""Llama by itself: causal, its loss, its window, what shapes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuseline.errors import InputError
from fuseline.models.llama import Llama, RopeScaling, preset, stretched
from fuseline.models.llama_config import PRESETS, LlamaConfig
from fuseline.nn import branch, fp8_linear
from fuseline.nn.fp8_linear import Fp8Step, put_on

TOKENS = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))


def fresh(**changes: Any) -> Llama:
    torch.manual_seed(1)
    model = Llama(preset("llama-tiny", **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3).add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("changes", [{}, {"window": 5}, {"qk_norm": True, "qkv_bias": True}])
def test_torch_and_fuseline_compute_the_same(changes: dict[str, Any]) -> None:
    ours, plain = fresh(**changes), fresh(**changes, kernels="torch")
    torch.testing.assert_close(ours(TOKENS), plain(TOKENS), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_of_torch_and_fuseline_are_the_same(tied: bool) -> None:
    ours, plain = fresh(tied=tied).train(), fresh(tied=tied, kernels="torch").train()
    targets = TOKENS.roll(-1, 1)
    targets[:, -1] = -1
    losses = [model(TOKENS, targets) for model in (ours, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_no_position_sees_a_later_one_or_one_before_the_window() -> None:
    model = fresh(window=5, num_layers=1)
    changed = TOKENS.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 512
    same = (model(TOKENS) - model(changed)).abs().amax((0, 2)) == 0
    assert same.nonzero().flatten().tolist() == [*range(10), *range(15, 24)]


def test_each_layer_is_told_which_weight_is_read_next(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[torch.nn.Module] = []
    told: list[torch.nn.Module | None] = []

    def watched(linear: torch.nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
        read.append(linear)
        told.append(options.get("following"))
        return branch(linear, x, **options)

    monkeypatch.setattr("fuseline.models.llama.branch", watched)
    model = fresh(num_layers=2)
    model(TOKENS)
    assert told == [*read[1:], None]
    assert read[-1] is model.head


def test_loss_is_the_cross_entropy_of_its_logits() -> None:
    model = fresh(tied=True)
    targets = TOKENS.roll(-1, 1).clone()
    targets[:, -1] = -1
    expected = F.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), targets[:, :-1].flatten())
    torch.testing.assert_close(model(TOKENS, targets), expected)
    assert model.head.weight is model.embedding.weight


def test_tables_stay_in_float32() -> None:
    model = fresh()
    assert model.rotary.cos is not None
    before = model.rotary.cos.clone()
    model.to(torch.bfloat16)
    assert model.rotary.cos.dtype is torch.float32
    assert torch.equal(model.rotary.cos, before)
    assert model(TOKENS).dtype is torch.bfloat16


def test_stretched_frequencies() -> None:
    frequencies = torch.tensor([2 * torch.pi / 10, 2 * torch.pi / 60, 2 * torch.pi / 1000]).double()
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 100)  # wavelengths under 25 stay, over 100 are divided
    low, high = 1.0, 4.0
    share = (100 / 60 - low) / (high - low)
    middle = frequencies[1] * (share + (1 - share) / 8)
    expected = torch.stack([frequencies[0], middle, frequencies[2] / 8])
    torch.testing.assert_close(stretched(frequencies, scaling), expected)
    assert torch.equal(stretched(frequencies, RopeScaling("linear", 4.0)), frequencies / 4)


def test_the_presets_have_the_published_sizes() -> None:
    sizes = {}
    for name in PRESETS:
        with torch.device("meta"):
            sizes[name] = Llama(preset(name, block_size=8)).num_parameters(non_embedding=False) / 1e9
    expected = {"llama2-7b": 6.74, "llama3-8b": 8.03, "llama3.2-1b": 1.24, "mistral-7b": 7.24}
    expected |= {"llama2-13b": 13.02, "qwen2.5-0.5b": 0.494, "qwen3-0.6b": 0.596}
    for name, billions in expected.items():
        assert sizes[name] == pytest.approx(billions, rel=5e-3), name


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"num_kv_heads": 3}, "cannot share 3"),
        ({"embed_dim": 66, "head_dim": 0}, "cannot be split"),
        ({"head_dim": 15}, "must be even"),
        ({"window": 0}, "window is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"kernels": "fuselin"}, "Did you mean 'fuseline'"),
        ({"block": 3}, "no Llama option"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        preset("llama-tiny", **changes)


def test_impossible_scalings_are_refused() -> None:
    with pytest.raises(InputError, match="yarn"):
        RopeScaling("yarn")
    with pytest.raises(InputError, match="high_factor"):
        RopeScaling("llama3", 8.0, 4.0, 1.0)
    with pytest.raises(InputError, match="above 0"):
        RopeScaling("linear", 0.0)
    with pytest.raises(InputError, match="no preset named 'llama2'"):
        preset("llama2")


def test_sequences_over_the_context_are_refused() -> None:
    model = Llama(LlamaConfig(8, 16, 1, 2, 1, 8, 16))
    with pytest.raises(InputError, match="9 tokens, and this model's block_size is 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_an_mlp_in_fp8_is_one_op_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours, step = fresh(), fresh(), Fp8Step()
    for block in ours.blocks:
        put_on(block.mlp.gate_up, step), put_on(block.mlp.down, step)
    activations = []
    fp8_mlp = fp8_linear.fp8_mlp

    def looked_at(*args: Any, **options: Any) -> torch.Tensor:
        activations.append(args[5])
        return fp8_mlp(*args, **options)

    monkeypatch.setattr(fp8_linear, "fp8_mlp", looked_at)
    assert torch.equal(ours(TOKENS), plain(TOKENS))
    assert not activations
    loss, wanted = ours.train()(TOKENS, TOKENS), plain(TOKENS, TOKENS)
    assert activations == ["swiglu"] * len(ours.blocks)
    assert loss.item() == pytest.approx(wanted.item(), rel=0.02)
    loss.backward(), wanted.backward()
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad - other.grad).norm() < 0.25 * other.grad.norm(), name


@pytest.mark.parametrize("changes", [{}, {"window": 5, "tied": True}, {"qk_norm": True, "qkv_bias": True}])
@pytest.mark.parametrize("half", [False, True])
def test_training_with_norms_apart_has_the_loss_of_the_blocks(
    half: bool, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, whole = fresh(**changes).train(), fresh(**changes).train()
    losses = []
    for model in (apart, whole):
        if model is whole:
            monkeypatch.setattr(Llama, "_trains_plainly", lambda self: False)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(TOKENS, TOKENS.roll(-1, 1))
        loss.backward()
        losses.append(loss)
    tolerance = {"rtol": 1e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(*losses, rtol=1e-3 if half else 1e-6, atol=0)
    for mine, theirs in zip(apart.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        scale = theirs.grad.abs().max()
        torch.testing.assert_close(mine.grad / scale, theirs.grad / scale, **tolerance)


def test_a_block_with_a_hook_is_called() -> None:
    model, seen = fresh().train(), []
    model.blocks[0].mlp.register_forward_hook(lambda *given: seen.append(given[0]))
    model(TOKENS, TOKENS).backward()
    assert seen == [model.blocks[0].mlp]
