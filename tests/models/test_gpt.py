"""GPT against a second, plain writing of GPT-2, and padded against unpadded."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseline.errors import InputError
from fuseline.models.gpt import GPT, PRESETS, preset

from .small_gpt import draw, make, small


def plain_gpt2(w: dict[str, Tensor], tokens: Tensor, layers: int, heads: int, approximate: str) -> Tensor:
    """Logits from GPT-2's equations and a state dict, sharing no code with the model."""

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    B, T = tokens.shape
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][torch.arange(T)]
    hidden = torch.ones(T, T).triu(1).bool()
    for layer in range(layers):
        name = f"transformer.h.{layer}"
        qkv = linear(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
        q, k, v = (part.view(B, T, heads, -1).permute(0, 2, 1, 3) for part in qkv.chunk(3, -1))
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
        y = (torch.softmax(scores, -1) @ v).permute(0, 2, 1, 3).flatten(2)
        x = x + linear(y, f"{name}.attn.c_proj")
        inner = F.gelu(linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc"), approximate=approximate)
        x = x + linear(inner, f"{name}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["lm_head.weight"].T


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation,approximate", [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_logits_and_loss_are_gpt2s(bias: bool, activation: str, approximate: str) -> None:
    config = small(bias=bias, activation=activation)
    model = make(config).double()
    tokens, targets = draw(config)
    expected = plain_gpt2(model.state_dict(), tokens, config.num_layers, config.num_heads, approximate)
    logits = model(tokens)
    assert logits.shape == (3, 11, 37)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    by_hand = -expected.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(tokens, targets), by_hand, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.next_token_logits(tokens), expected[:, -1], rtol=1e-10, atol=1e-10)


def test_ignored_targets_do_not_count() -> None:
    config = small()
    model = make(config)
    tokens, targets = draw(config)
    targets[:, 5:] = -1
    torch.testing.assert_close(model(tokens, targets), model(tokens[:, :5], targets[:, :5]))


def test_state_dict_has_nanogpts_names() -> None:
    layer = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    weights = {f"transformer.h.{i}.{part}.weight" for i in range(2) for part in layer}
    biases = {name.replace(".weight", ".bias") for name in weights} | {"transformer.ln_f.bias"}
    rest = {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "lm_head.weight"}
    assert set(GPT(small()).state_dict()) == weights | biases | rest
    assert set(GPT(small(bias=False)).state_dict()) == weights | rest


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_padding_changes_neither_loss_nor_gradients(dtype: torch.dtype) -> None:
    plain, padded = make(small()).to(dtype), make(small(vocab_multiple=64)).to(dtype)
    assert padded.lm_head.weight.shape == (64, 32)
    assert torch.count_nonzero(padded.lm_head.weight[37:]) == 0
    assert torch.equal(padded.lm_head.weight[:37], plain.lm_head.weight)
    with torch.no_grad():  # padding far from zero, which would win every position if it were seen
        padded.lm_head.weight[37:] = 100.0
    tokens, targets = draw(plain.config)
    losses = [model(tokens, targets) for model in (plain, padded)]
    for loss in losses:
        loss.backward()
    assert losses[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = dtype == torch.float64
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12 if exact else 1e-2, atol=0)
    for (name, a), b in zip(plain.named_parameters(), padded.parameters(), strict=True):
        rows = a.shape[0]
        assert torch.count_nonzero(b.grad[rows:]) == 0, name
        torch.testing.assert_close(b.grad[:rows], a.grad, rtol=0, atol=1e-12 if exact else 2e-2)
    logits = padded(tokens)
    assert logits.shape[-1] == 37
    assert padded.next_token_logits(tokens).isfinite().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")  # inductor's own imports
@pytest.mark.parametrize(
    "backend,changes",
    [
        ("aot_eager", {}),
        ("aot_eager", {"norm": "fuseline", "attention": "naive_fused"}),
        ("inductor", {}),
    ],
)
def test_compiles_to_one_graph_with_equal_gradients(backend: str, changes: dict[str, str]) -> None:
    config = small(vocab_multiple=64, **changes)
    eager, model = make(config), make(config)
    tokens, targets = draw(config)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    losses = eager(tokens, targets), compiled(tokens, targets)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    assert torch.count_nonzero(model.lm_head.weight.grad[37:]) == 0
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6)


def test_runs_with_parameters_of_another() -> None:
    models = [make(small(norm="fuseline"), seed).train() for seed in (0, 1)]
    tokens, _ = draw(models[0].config)
    state = {name: value.detach() for name, value in models[1].named_parameters()}
    found = torch.func.functional_call(models[0], state, (tokens,))
    torch.testing.assert_close(found, models[1](tokens))


def test_trains_on_meta() -> None:
    with torch.device("meta"):
        model = GPT(small(norm="fuseline")).train()
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    model(tokens, tokens).backward()
    assert model.transformer.h[0].mlp.c_fc.weight.grad.shape == (128, 32)


@pytest.mark.parametrize("vocab_multiple", [1, 64])
def test_autocast_gives_the_loss_in_fp32(vocab_multiple: int) -> None:
    model = make(small(vocab_multiple=vocab_multiple))
    tokens, targets = draw(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens).dtype == torch.bfloat16
        loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, model(tokens, targets), rtol=2e-2, atol=0)


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_step() -> None:
    config = small(vocab_multiple=64)
    model = make(config).cuda()
    tokens, targets = (t.cuda() for t in draw(config))
    expected = torch.autograd.grad(model(tokens, targets), model.lm_head.weight)[0]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(model(tokens, targets), model.lm_head.weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (gradient,) = torch.autograd.grad(model(tokens, targets), model.lm_head.weight)
    gradient.zero_()
    graph.replay()
    torch.testing.assert_close(gradient, expected)


def test_without_dropout_no_op_is_added() -> None:
    model = GPT(small()).train()
    assert not [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    tokens, targets = draw(model.config)
    assert torch.equal(model(tokens, targets), model.eval()(tokens, targets))


def test_dropout_drops_while_training_only() -> None:
    model = GPT(small(dropout=0.5)).train()
    tokens, targets = draw(model.config)
    assert not torch.equal(model(tokens, targets), model(tokens, targets))
    model.eval()
    assert torch.equal(model(tokens, targets), model(tokens, targets))


def test_fresh_weights_have_gpt2s_deviations() -> None:
    torch.manual_seed(0)
    model = GPT(preset("tiny"))
    std = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    assert std["transformer.wte.weight"] == pytest.approx(0.02, rel=0.02)
    assert std["transformer.h.0.attn.c_attn.weight"] == pytest.approx(0.02, rel=0.02)
    assert std["transformer.h.3.mlp.c_proj.weight"] == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert torch.count_nonzero(model.transformer.h[0].mlp.c_fc.bias) == 0
    # With so small weights a fresh model knows nothing: every token is about as likely.
    tokens, targets = draw(model.config, batch=4, seqlen=64)
    assert model(tokens, targets).item() == pytest.approx(math.log(1000), abs=0.1)


def test_parameter_counts_are_the_published_ones() -> None:
    with torch.device("meta"):
        assert round(GPT(preset("shakespeare")).num_parameters() / 1e6, 2) == 10.65
        gpt2 = GPT(preset("gpt2"))
        assert gpt2.num_parameters(non_embedding=False) == 124_439_808
        assert gpt2.num_parameters() == 124_439_808 - 1024 * 768
        assert GPT(preset("gpt2", vocab_multiple=64)).num_parameters() == gpt2.num_parameters()
        assert GPT(preset("gpt2-xl")).num_parameters(non_embedding=False) == 1_557_611_200


def test_cropped_model_keeps_its_logits() -> None:
    model = make(small())
    tokens, _ = draw(model.config, seqlen=8)
    before = model(tokens)
    model.crop_block_size(8)
    assert torch.equal(model(tokens), before)
    assert model.config.block_size == 8
    with pytest.raises(InputError, match="block_size is 8"):
        model(draw(model.config, seqlen=9)[0])
    with pytest.raises(InputError, match=r"1\.\.8"):
        model.crop_block_size(9)


@pytest.mark.parametrize(
    "overrides,message",
    [
        ({"num_heads": 5}, "cannot be split among 5 heads"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"activation": "gelu_tan"}, "Did you mean 'gelu_tanh'"),
        ({"norm": "fuselin"}, "Did you mean 'fuseline'"),
        ({"vocab_multiple": 0}, "vocab_multiple is 0"),
    ],
)
def test_impossible_configs_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(**overrides)


def test_an_unknown_attention_backend_is_refused_when_the_model_is_made() -> None:
    with pytest.raises(InputError, match="Did you mean 'efficient'"):
        GPT(small(attention="eficient"))


@pytest.mark.parametrize("attention", ["naive", "naive_fused", "math", "flash"])
@pytest.mark.parametrize("norm", ["torch", "fuseline"])
def test_backends_change_no_number(attention: str, norm: str) -> None:
    plain, other = make(small()), make(small(attention=attention, norm=norm))
    tokens, targets = draw(plain.config)
    losses = [model(tokens, targets) for model in (plain, other)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)


def test_presets_by_name() -> None:
    assert preset("gpt2", dropout=0.1).dropout == 0.1
    assert list(PRESETS) == ["tiny", "shakespeare", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    with pytest.raises(InputError, match="Did you mean 'gpt2-medium'"):
        preset("gpt2-mediun")
    with pytest.raises(InputError, match="Did you mean 'embed_dim'"):
        preset("gpt2", embed_dims=3)


@pytest.mark.parametrize("loss", ["fuseline", "fuseline-linear"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_every_loss_is_the_same_loss(loss: str, device: str, dtype: torch.dtype | None) -> None:
    """Value and gradients, with a padded vocabulary and targets left out; under autocast to rounding."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (3, 16), device=device)
    targets = torch.randint(0, 50, (3, 16), device=device)
    targets[0, :5] = -1
    found = []
    for kind in ("float32", loss):
        torch.manual_seed(1)
        config = preset("tiny", vocab_size=50, vocab_multiple=64, block_size=16, loss=kind)
        model = GPT(config).to(device)
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            value = model(tokens, targets)
        value.backward()
        found.append((value, torch.cat([p.grad.flatten() for p in model.parameters()])))
    (value, grads), (ours, our_grads) = found
    tolerance = 1e-5 if dtype is None else 2e-2
    assert ours.item() == pytest.approx(value.item(), rel=tolerance)
    assert (our_grads - grads).norm() <= tolerance * grads.norm()
