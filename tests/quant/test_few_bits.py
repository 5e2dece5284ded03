"""Formats of codes, int8 activations and 2:4 sparsity in layers and models."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import fuseline
from fuseline.cli.generate import FEW_BITS, QUANTS
from fuseline.errors import InputError
from fuseline.nn import QuantLinear
from fuseline.ops.quant_codes import CODES
from fuseline.ops.quant_sparse import largest_of_four
from fuseline.quant import (
    Format,
    gptq,
    load_quantized,
    methods_of,
    quantize_linear,
    round_to_fitted,
    round_to_nearest,
    save_quantized,
)

from .drawn import Small, skewed

CODED = tuple(Format(name) for name in CODES)


def gaussian(n: int = 128, k: int = 512) -> torch.Tensor:
    return torch.randn((n, k), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("format", CODED, ids=lambda f: f.name)
def test_every_value_at_every_scale_is_kept(format: Format) -> None:
    """Weights that are a scale times values of the table come back to the bit."""
    codes = CODES[format.name]
    k = codes.group_size + 5
    table = torch.tensor(codes.values)
    weight = table[torch.randint(0, len(table), (30, k), generator=torch.Generator().manual_seed(3))]
    weight[:, :3] = weight[:, -3:] = torch.tensor([max(codes.values), min(codes.values), 0.0])
    weight *= torch.tensor([2.0**i for i in range(-15, 15)])[:, None]
    found = round_to_nearest(weight, format)
    assert torch.equal(found.dequantized(), weight)
    layer = QuantLinear(k, 30, format.name)
    found.fill(layer)
    assert torch.equal(layer.dequantized(), weight)
    assert torch.equal(layer.dequantized(torch.float64), weight.double())


def test_rounding_by_hand() -> None:
    """The nearest of fp4's values at scale 1. Halves go to the even code."""
    weight = torch.zeros(1, 32)
    given = [6.0, 0.2, 0.25, 0.3, 0.75, 1.75, 2.5, 3.5, 4.9, 5.0, 5.1, -0.25, -0.75, -2.5, -5.0, -0.1]
    wanted = [6.0, 0.0, 0.0, 0.5, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0, 6.0, 0.0, -1.0, -2.0, -4.0, 0.0]
    weight[0, : len(given)] = torch.tensor(given)
    for name in ("fp4", "mxfp4"):
        assert round_to_nearest(weight, Format(name)).dequantized()[0, : len(given)].tolist() == wanted
    weight[0, 0] = 7.9  # 2 ** 2 is still its exponent: the scale stays, and 7.9 becomes 6
    assert round_to_nearest(weight, Format("mxfp4")).dequantized()[0, :4].tolist() == [6.0, 0.0, 0.0, 0.5]
    weight[0, 0] = 8.0
    assert round_to_nearest(weight, Format("mxfp4")).dequantized()[0, :4].tolist() == [8.0, 0.0, 0.0, 0.0]


def test_ternary_by_hand() -> None:
    """Of magnitudes 1, 1, 4, 6 with mean 3, those above 2.1 make the scale: 5."""
    found = round_to_nearest(torch.tensor([[1.0, -1.0, -4.0, 6.0]]), Format("ternary"))
    assert found.dequantized().tolist() == [[0.0, 0.0, -5.0, 5.0]]
    assert round_to_nearest(torch.zeros(2, 7), Format("ternary")).dequantized().abs().sum() == 0


def test_more_bits_have_less_error() -> None:
    weight = gaussian()
    errors = {
        f.name: float((round_to_nearest(weight, f).dequantized() - weight).norm() / weight.norm())
        for f in (*CODED, Format("int8"), Format("int4", 64))
    }
    ranks = (
        ("ternary",),
        ("int3",),
        ("fp4", "nf4", "mxfp4", "int4"),
        ("int5",),
        ("fp6_e2m3", "fp6_e3m2"),
        ("int8",),
    )
    for worse, better in itertools.pairwise(ranks):
        assert min(errors[name] for name in worse) > max(errors[name] for name in better), errors
    assert errors["nf4"] < errors["fp4"] < errors["mxfp4"]  # nf4 is made for normal weights
    assert errors["ternary"] == pytest.approx(
        0.19**0.5, rel=0.03
    )  # the best three levels for a normal weight


@pytest.mark.parametrize("format", CODED, ids=lambda f: f.name)
def test_fitted_scales_are_nearer(format: Format) -> None:
    weight = gaussian()[:, :300]
    weight[::3, ::50] *= 6
    nearest, fitted = (
        of(weight, format).dequantized() - weight for of in (round_to_nearest, round_to_fitted)
    )
    assert fitted.norm() <= nearest.norm()
    if format.name in ("int3", "int5", "fp4", "nf4"):  # others seldom gain: powers of two, six bits
        assert fitted.norm() < 0.99 * nearest.norm()


@pytest.mark.parametrize("name", ["int3", "ternary", "int5", "w8a8"])
def test_gptq_in_few_bits(name: str) -> None:
    linear, inputs = nn.Linear(200, 40, bias=False), skewed(800, 200)
    layer, report = quantize_linear(linear, Format(name), inputs.T @ inputs / 800)
    assert report.output_error is not None
    assert report.nearest_error is not None
    assert report.output_error < 0.7 * report.nearest_error
    found = gptq(linear.weight, inputs.T @ inputs / 800, Format(name)).dequantized()
    assert torch.equal(layer.dequantized(), found)


@pytest.mark.parametrize("name", [*CODES, "w8a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_layers_against_float64(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = quantize_linear(nn.Linear(201, 50), Format(name))[0].to(dtype)
    x = torch.randn(3, 2, 201).to(dtype)
    assert layer.bias is not None
    wanted = x.double() @ layer.dequantized(torch.float64).t() + layer.bias.double()
    tolerance = 0.02 if name == "w8a8" else 4 * max(torch.finfo(dtype).eps, 2e-7)
    got = layer(x)
    assert got.dtype is dtype
    assert (got.double() - wanted).norm() <= tolerance * wanted.norm()
    with pytest.raises(InputError, match=r"201 inputs was given x of shape \[2, 200\]"):
        layer(x[0, :, :200])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x.float()).dtype is torch.bfloat16


def test_the_input_of_codes_has_a_gradient() -> None:
    layer = quantize_linear(nn.Linear(64, 32), Format("nf4"))[0]
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantized().sum(0).expand(3, 64))


@pytest.mark.parametrize("name", [*CODES, "w8a8"])
def test_models_are_saved_loaded_and_undone(
    name: str, model: Small, tokens: torch.Tensor, tmp_path: Path
) -> None:
    before = model(tokens)
    done = fuseline.quantize(model, name, keep_original=True)
    assert [layer.name for layer in done.quantized] == ["up", "down"]
    after = model(tokens)
    assert 0 < (after - before).norm() < (0.6 if name == "ternary" else 0.3) * before.norm()
    path = tmp_path / "model.safetensors"
    save_quantized(model, path)
    fresh = load_quantized(Small().eval(), path)
    assert torch.equal(fresh(tokens), after)
    with torch.device("meta"):
        empty = Small().eval()
    assert torch.equal(load_quantized(empty, path)(tokens), after)
    assert torch.equal(copy.deepcopy(model)(tokens), after)
    assert torch.equal(done.restore()(tokens), before)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("n, k", [(64, 640), (7, 131)])
def test_states_have_the_promised_bytes(name: str, n: int, k: int) -> None:
    layer = quantize_linear(nn.Linear(k, n, bias=False), Format(name))[0]
    codes = CODES[name]
    scale = 1 if name == "mxfp4" else 2
    wanted = n * (-(-k // codes.codes_per_word) * codes.bytes_per_word + -(-k // codes.group_size) * scale)
    assert sum(tensor.nbytes for tensor in layer.state_dict().values()) == wanted == layer.weight_bytes
    if k == 640:
        assert wanted == n * k * codes.bits_per_weight / 8
    assert f"group_size={codes.group_size}" in repr(layer)


def test_groups_are_the_formats_own() -> None:
    assert Format("nf4", 64) == Format("nf4", 64)
    with pytest.raises(InputError, match="Groups of nf4 are 64 columns, not 32"):
        Format("nf4", 32)
    with pytest.raises(InputError, match="go with int4, not with nf4"):
        Format("nf4", zero_points=True)


def test_which_format_has_which_method() -> None:
    assert methods_of("int3") == methods_of("ternary") == ("nearest", "fitted", "hqq", "gptq")
    assert methods_of("nf4") == methods_of("mxfp4") == ("nearest", "fitted")
    assert methods_of("fp8") == methods_of("sparse24") == ("nearest",)


def test_calibration_measures_what_it_cannot_improve(model: Small, tokens: torch.Tensor) -> None:
    done = fuseline.quantize(model, "nf4", calibrate=[tokens])
    for layer in done.quantized:
        assert layer.output_error is not None
        assert layer.output_error == layer.nearest_error


def test_weights_with_nan_are_left(model: Small) -> None:
    with torch.no_grad():
        model.up.weight[3, 4] = float("nan")
    done = fuseline.quantize(model, "nf4")
    assert {layer.name: layer.reason for layer in done.left}["up"] == "its weight has NaN or infinities"


def test_a_sparse_layer_holds_what_stayed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64)).bfloat16()
    weight = model[0].weight.detach()
    layer, report = quantize_linear(model[0], Format("sparse24"))
    assert torch.equal(layer.dequantized(torch.bfloat16), torch.where(largest_of_four(weight), weight, 0))
    assert report.bytes_after == weight.nbytes * 9 // 16 == layer.weight_bytes
    assert 0.4 < (report.weight_error or 0) < 0.5
    model[0] = layer
    save_quantized(model, tmp_path / "model.safetensors")
    again = load_quantized(nn.Sequential(nn.Linear(128, 64)).bfloat16(), tmp_path / "model.safetensors")
    assert torch.equal(again[0].dequantized(), layer.dequantized())
    assert again[0].float().weight.dtype is torch.float32


@pytest.mark.gpu
def test_sparse_models_on_a_gpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 96), nn.Linear(96, 10)).cuda().half()
    x = torch.randn(9, 128, device="cuda").half()
    done = fuseline.quantize(model, "sparse24", keep_original=True)
    assert [layer.name for layer in done.quantized] == ["0", "2"]
    assert "multiples of 32" in str(done.left[0].reason)
    with torch.no_grad():
        wanted = x.double()
        for layer in model:
            dense = layer.dequantized(torch.float64) if isinstance(layer, QuantLinear) else None
            wanted = (
                layer.double()(wanted)
                if dense is None
                else nn.functional.linear(wanted, dense, layer.bias.double())
            )
        model[3].half()
        y = model(x)
        assert (y.double() - wanted).norm() < 5e-3 * wanted.norm()
        save_quantized(model, tmp_path / "model.safetensors")
        fresh = (
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 96), nn.Linear(96, 10)).cuda().half()
        )
        assert torch.equal(load_quantized(fresh, tmp_path / "model.safetensors")(x), y)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CODES, "w8a8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_layers_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """As on a CPU, and in a captured graph."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 64).to(dtype)
    here = quantize_linear(linear, Format(name))[0]
    there = quantize_linear(linear.cuda(), Format(name))[0]
    for (key, one), other in zip(here.state_dict().items(), there.state_dict().values(), strict=True):
        assert torch.equal(one, other.cpu()), key
    x = torch.randn(5, 256).to(dtype)
    wanted = here(x).double()
    on_gpu = x.cuda()
    with torch.no_grad():
        y = there(on_gpu)
        assert (y.cpu().double() - wanted).norm() < 4 * torch.finfo(dtype).eps * wanted.norm()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = there(on_gpu)
        graph.replay()
        assert torch.equal(captured, y)


def test_the_document_has_the_table() -> None:
    """Every row of docs/generation.md is the code's: bits, codes in bytes, groups, scales."""
    document = (Path(__file__).parents[2] / "docs/generation.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in document.splitlines()
        if line.startswith("| `") and line.split("`")[1] in CODES
    ]
    assert [row[0].strip("`") for row in rows] == list(CODES)
    for row, codes in zip(rows, CODES.values(), strict=True):
        assert row[2:] == [
            f"{codes.bits:g}",
            f"{codes.codes_per_word} in {codes.bytes_per_word}",
            f"{codes.group_size}",
            codes.scale,
            f"{codes.bits_per_weight:g}",
        ]
        assert row[1].endswith(f"{max(codes.values):g}")


def test_the_command_line_names_all_codes() -> None:
    assert set(FEW_BITS) == set(CODES)
    assert set(QUANTS) == {"none", "int8", "int4", "fp8", "w8a8", *CODES}
