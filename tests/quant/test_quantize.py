"""The walk over a model and back, what is left and why, and autocast."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import fuseline
from fuseline.errors import InputError
from fuseline.models.encoder_decoder import EncoderDecoder
from fuseline.models.llama import Llama, preset
from fuseline.models.translation_config import TranslationConfig
from fuseline.nn import QuantLinear
from fuseline.quant import (
    Format,
    NothingQuantizedError,
    hqq,
    load_quantized,
    quantize_linear,
    register_with_transformers,
    round_to_fitted,
    round_to_nearest,
)
from fuseline.quant.speed import can_time, layer_time_us

from .drawn import ALL, Small, skewed


def test_walks_a_model_and_back(model: Small, tokens: torch.Tensor) -> None:
    before = model(tokens)
    originals = (model.up, model.down)
    done = fuseline.quantize(model, "int8", keep_original=True)
    assert [layer.name for layer in done.quantized] == ["up", "down"]
    assert done.left[0].name == "head"
    assert done.left[0].reason == "its weight is also embedding.weight"
    assert isinstance(model.up, QuantLinear)
    assert not model.up.training
    after = model(tokens)
    assert (after - before).norm() < 0.02 * before.norm()
    assert not torch.equal(after, before)
    assert "2 of 3 layers" in done.table()
    assert "head  96 x 50  float32: its weight is also embedding.weight" in done.table()
    assert done.restore() is model
    assert (model.up, model.down) == originals
    assert torch.equal(model(tokens), before)


def test_originals_are_not_kept_unless_asked(model: Small) -> None:
    done = fuseline.quantize(model, "int4", group_size=32)
    with pytest.raises(InputError, match="keep_original=True"):
        done.restore()
    with pytest.raises(InputError, match=r"no torch\.nn\.Linear layers"):
        fuseline.quantize(nn.Sequential(model.up), "int8")


@pytest.mark.parametrize("skip", ["up", ["up"], ("u*",)])
def test_a_name_or_several_are_left(model: Small, skip: str | list[str] | tuple[str, ...]) -> None:
    done = fuseline.quantize(model, "int8", skip=skip)
    assert [layer.name for layer in done.quantized] == ["down"]
    assert [layer.name for layer in done.left] == ["up", "head"]


def test_calibrates_on_batches(model: Small, tokens: torch.Tensor) -> None:
    done = fuseline.quantize(model, "int4", group_size=32, calibrate=[tokens, (tokens,), {"tokens": tokens}])
    for layer in done.quantized:
        assert layer.output_error is not None
        assert layer.nearest_error is not None
        assert layer.output_error < layer.nearest_error
    assert "to the nearest" in done.table()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"format": "int2"}, "no format named 'int2'"),
        ({"format": "INT8"}, "named 'INT8'. Did you mean 'int8'"),
        ({"format": torch.int8}, "no format named torch.int8. Did you mean 'int8'"),
        ({"format": None}, "no format named None. Known: int8, int4, fp8, plain"),
        ({"format": "int4", "group_size": 48}, "32, 64 or 128 columns, not 48"),
        ({"format": "int8", "zero_points": True}, "go with int4"),
        ({"format": "int8", "skip": ["haed"]}, "no module to skip named 'haed'"),
        ({"format": "int8", "calibrate": []}, "no batches"),
        ({"format": "int8", "calibrate": [3]}, "a tensor, or a tuple or a mapping"),
        ({"format": "int8", "max_rows": 0}, "max_rows is 0"),
        ({"format": "int4", "method": "hpq"}, "no method named 'hpq'.*'hqq'"),
        ({"format": "int4", "method": "gptq"}, 'calibrate=, or take "hqq"'),
        ({"format": "fp8", "calibrate": [torch.zeros(1, 2, dtype=torch.long)]}, "calibrate= goes with int8"),
        ({"format": "fp8", "method": "hqq"}, "each weight becomes the nearest"),
        ({"format": "nf4", "method": "hqq"}, "evenly spaced; nf4 has nearest and fitted"),
        ({"format": "sparse24", "method": "fitted"}, "stays as it is, or becomes zero"),
        ({"format": "sparse24"}, "run on NVIDIA GPUs, and this weight is on cpu. Move the model"),
        (
            {"format": "plain", "method": "hqq"},
            "method='hqq' goes with int8, int4.*; plain .* stays as it is",
        ),
    ],
)
def test_refuses(model: Small, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fuseline.quantize(model, **arguments)  # type: ignore[arg-type]
    assert isinstance(model.up, nn.Linear)


def test_an_empty_layer_says_what_it_lacks() -> None:
    with pytest.raises(InputError, match="group_size is 0; int4 has"):
        QuantLinear(64, 32, "int4")
    with pytest.raises(InputError, match="no format named 'int7'"):
        QuantLinear(64, 32, "int7")


@pytest.mark.parametrize("method", ["nearest", "fitted", "hqq", "gptq"])
def test_methods_by_name(model: Small, tokens: torch.Tensor, method: str) -> None:
    """Batches tell the outputs' error of any; without one, batches mean GPTQ and none the nearest."""
    weight = model.up.weight.detach().clone()
    done = fuseline.quantize(
        model, "int4", group_size=32, method=method, calibrate=[tokens], keep_original=True
    )
    error = done.quantized[0].output_error
    assert error is not None
    assert (error < (done.quantized[0].nearest_error or 0)) == (method != "nearest")
    assert isinstance(model.up, QuantLinear)
    got = model.up.dequantized()
    done.restore()
    if method == "gptq":
        fuseline.quantize(model, "int4", group_size=32, calibrate=[tokens])
        assert torch.equal(got, model.up.dequantized())
        return
    found = {"nearest": round_to_nearest, "fitted": round_to_fitted, "hqq": hqq}[method](
        weight, Format("int4", 32)
    )
    scales, zeros = (t.repeat_interleave(32, 1) for t in (found.scales, found.zeros))
    torch.testing.assert_close(got, (found.integers - zeros) * scales)
    fuseline.quantize(model, "int4", group_size=32, method=None if method == "nearest" else method)
    assert torch.equal(got, model.up.dequantized())


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_what_others_read_is_left_and_told() -> None:
    """Subclasses, attention's output, and the layers that torch's encoder reads in inference."""
    torch.manual_seed(0)

    class Sub(nn.Linear):
        pass

    encoder = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(32, 32), Sub(32, 32), Doubling(32, 32), encoder).eval()
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        before = model(x)
        done = fuseline.quantize(model, "int8")
        assert [layer.name for layer in done.quantized] == ["0"]
        assert {layer.name: str(layer.reason).split(",")[0] for layer in done.left} == {
            "1": "it is a Sub",
            "2": "it is a Doubling",
            "3.self_attn.out_proj": "it is a NonDynamicallyQuantizableLinear",
            "3.linear1": "TransformerEncoderLayer reads its weight without calling it",
            "3.linear2": "TransformerEncoderLayer reads its weight without calling it",
        }
        assert "forward of its own" in str(done.left[1].reason)
        assert (model(x) - before).norm() < 0.02 * before.norm()


def test_what_our_own_modules_read_is_left() -> None:
    """A translation model's products without their bias, and a loss's table of classes."""
    torch.manual_seed(0)
    config = TranslationConfig(50, "encoder-decoder", num_layers=1, num_heads=2, embed_dim=32, ffn_dim=64)
    model = EncoderDecoder(config).eval()
    source, target = torch.randint(1, 50, (2, 5)), torch.randint(1, 50, (2, 4))
    with torch.no_grad():
        before = model(source, target)
        done = fuseline.quantize(model, "int8")
        assert (model(source, target) - before).norm() < 0.05 * before.norm()
    assert done.quantized
    assert {layer.name.rsplit(".", 1)[1] for layer in done.left} >= {"out", "inner"}
    loss = fuseline.nn.LinearCrossEntropyLoss(16, 7)
    with pytest.raises(
        NothingQuantizedError, match=r"1 linear layer stays .* reads its weight without calling it\."
    ):
        fuseline.quantize(loss, "int8")


def test_a_bare_layer_is_quantized_and_put_back() -> None:
    linear, x = nn.Linear(64, 48), torch.randn(3, 64)
    done = fuseline.quantize(linear, "int8", keep_original=True)
    assert type(done.model).__name__ == "QuantLinear"
    assert (done.model(x) - linear(x)).norm() < 0.02 * linear(x).norm()
    assert done.restore() is linear


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_transformers_gpt2_is_quantized(format: str, tmp_path: Path) -> None:
    """Its layers are Conv1D, whose weight is [in, out]; the head shares its weight with the embedding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=96, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 96, (2, 12))
    with torch.no_grad():
        before = model(tokens).logits
        done = fuseline.quantize(model, format, **({"group_size": 32} if format == "int4" else {}))
        after = model(tokens).logits
        assert len(done.quantized) == 8
        assert done.left[0].reason == "its weight is also transformer.wte.weight"
        assert 0 < (after - before).norm() < {"int8": 0.02, "int4": 0.2}[format] * before.norm()
        done.save(tmp_path / "quantized.safetensors")
        again = transformers.GPT2LMHeadModel(config).eval()
        load_quantized(again, tmp_path / "quantized.safetensors")
        assert torch.equal(again(tokens).logits, after)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_reads_what_it_saved(kind: str, format: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=96, n_positions=32, n_embd=64, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(config).eval()
    else:
        config = transformers.LlamaConfig(
            vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 96, (2, 12))
    done = fuseline.quantize(
        model, format, keep_original=True, **({"group_size": 32} if format == "int4" else {})
    )
    with torch.no_grad():
        wanted = model(tokens).logits
        model.save_pretrained(tmp_path)
        register_with_transformers()
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert sum(isinstance(m, QuantLinear) for m in again.modules()) == len(done.quantized)
        assert torch.equal(again(tokens).logits, wanted)
        half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert half.dtype is torch.bfloat16
        assert (half(tokens).logits - wanted).norm() < 0.05 * wanted.norm()
    assert not hasattr(done.restore().config, "quantization_config")


def test_calibration_reaches_a_conv1d() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=96, n_positions=32, n_embd=64, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    done = fuseline.quantize(model, "int4", group_size=32, calibrate=[torch.randint(0, 96, (4, 32))])
    assert all(layer.output_error < layer.nearest_error for layer in done.quantized)


def test_refuses_batches_that_miss_a_layer(model: Small, tokens: torch.Tensor) -> None:
    holder = nn.ModuleDict({"used": model, "unused": nn.Linear(3, 3)})
    holder.forward = model.forward  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"never reach unused"):
        fuseline.quantize(holder, "int8", calibrate=[tokens])
    assert [
        r.name for r in fuseline.quantize(holder, "int8", skip=["unused"], calibrate=[tokens]).quantized
    ] == [
        "used.up",
        "used.down",
    ]


def test_a_dtype_reaches_the_bias_and_not_the_scales() -> None:
    for format in ALL[:5]:
        layer, _ = quantize_linear(nn.Linear(64, 32), format)
        before = layer.dequantized()
        layer.to(torch.bfloat16)
        assert torch.equal(layer.dequantized(), before)
        assert layer(torch.randn(2, 64).bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ALL, ids=lambda f: str(f))
def test_autocast_casts_what_a_linear_casts(format: Format, dtype: torch.dtype, device: str) -> None:
    """The numbers are those of a layer and rows in that dtype, and the gradient is x's."""
    linear = nn.Linear(64, 32, device=device)
    layer, _ = quantize_linear(linear, format)
    cast = copy.deepcopy(layer).to(dtype)
    for given in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(3, 64, device=device).to(given)
        with torch.autocast(device, dtype):
            y, theirs = layer(x), linear(x)
        assert y.dtype is theirs.dtype is dtype
        if format.name == "plain":  # on a GPU by torch's kernel here, by ours there
            torch.testing.assert_close(y, theirs)
            torch.testing.assert_close(y, cast(x.to(dtype)))
        else:
            assert torch.equal(y, cast(x.to(dtype)))
    x = torch.randn(3, 64, device=device, requires_grad=True)
    if format.name != "fp8":
        with torch.autocast(device, dtype):
            layer(x).sum().backward()
        torch.testing.assert_close(x.grad, layer.dequantized().sum(0).expand(3, 64), atol=0.02, rtol=0.02)


def test_autocast_leaves_float64() -> None:
    linear = nn.Linear(64, 32)
    x = torch.randn(3, 64, dtype=torch.float64)
    for format in ALL[:5]:
        layer, _ = quantize_linear(linear, format)
        wanted = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), wanted)
    layer, _ = quantize_linear(linear.double(), Format("plain"))
    wanted = linear(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize("format", ALL, ids=lambda f: str(f))
def test_shapes_alone_go_through(format: Format) -> None:
    layer = quantize_linear(nn.Linear(64, 32), format)[0].to("meta")
    assert layer(torch.empty(3, 64, device="meta")).shape == (3, 32)


def test_compiles_without_a_break(model: Small, tokens: torch.Tensor) -> None:
    fuseline.quantize(model, "int4", group_size=32)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))


def stopwatch(monkeypatch: pytest.MonkeyPatch, times: dict[int, float]) -> list[int]:
    """Layers of fp8 take `times` by their out_features, others 10 us; answers the rows that were timed."""
    module = importlib.import_module("fuseline.quant.quantize")
    seen: list[int] = []

    def time(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
        seen.append(len(x))
        with torch.no_grad():
            layer(x)
        of = layer.args[0] if isinstance(layer, partial) else layer
        return times.get(of.out_features, 10.0) if isinstance(of, QuantLinear) else 10.0

    monkeypatch.setattr(module, "can_time", lambda weight: True)
    monkeypatch.setattr(module, "layer_time_us", time)
    return seen


def test_slower_layers_are_left(model: Small, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = stopwatch(monkeypatch, {200: 12.5})
    done = fuseline.quantize(model, "fp8", max_rows=3)
    assert {layer.name: layer.format for layer in done.layers} == {
        "up": "float32",
        "down": "fp8",
        "head": "float32",
    }
    assert done.left[0].reason == "fp8 takes 12.5 us for 3 rows, the original layer 10.0"
    assert type(model.up) is nn.Linear
    assert set(rows) == {3}
    assert model(tokens).isfinite().all()


def test_layers_are_timed_on_a_cpu(model: Small) -> None:
    """Any dtype; which stay is the machine's to say, and they say why."""
    for dtype in (torch.float32, torch.bfloat16):
        assert can_time(torch.zeros(1, dtype=dtype))
        taken = layer_time_us(nn.Linear(64, 64).to(dtype), torch.zeros(2, 64, dtype=dtype))
        assert 0 < taken < 1e5
    done = fuseline.quantize(model, "int8", max_rows=1)
    assert len(done.layers) == 3
    for layer in done.left:
        assert layer.name == "head" or "us for 1 row, the original layer" in str(layer.reason)


def test_models_that_decode_leave_what_fp8_slows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are timed as blocks run them, each size once; int8 and int4 are not."""
    module = importlib.import_module("fuseline.training.text_generator")
    llama = Llama(preset("llama-tiny")).eval()
    config = llama.config
    rows = stopwatch(monkeypatch, {config.embed_dim: 11.0})
    left = module._quantize(llama, "fp8", 128, 1)
    assert {layer.name.rsplit(".", 1)[1] for layer in left} == {"out", "down"}
    assert len(left) == 2 * config.num_layers
    assert set(rows) == {1}
    assert len(rows) == 8  # four sizes, twice each
    rows.clear()
    assert module._quantize(Llama(config), "int8", 128) == ()
    assert not rows


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "plain"])
def test_quantizes_on_a_gpu(format: str) -> None:
    """Calibrated there; layers too small to gain are left, and say with what times."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 32)).cuda().bfloat16()
    x = skewed(600, 4096).cuda().bfloat16()
    wanted = model(x)
    done = fuseline.quantize(model, format, calibrate=[x] if format in ("int8", "int4") else None, max_rows=1)
    for layer in done.left:
        assert layer.reason is not None
        assert "us for 1 row" in layer.reason
    if format in ("int8", "int4"):
        assert done.quantized[0].name == "0"
    error = (model(x[:3]) - wanted[:3]).norm() / wanted[:3].norm()
    assert error < {"int8": 0.02, "int4": 0.2, "fp8": 0.1, "plain": 0.01}[format]
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured), torch.no_grad():
        y = model(x[:3])
    captured.replay()
    assert torch.equal(y, model(x[:3]))
