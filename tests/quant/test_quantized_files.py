"""Files of quantized models: written, read back to the same bits, and refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fuseline
from fuseline.errors import InputError
from fuseline.quant import (
    load_quantized,
    save_quantized,
    saved_about,
)

from .drawn import Small


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "plain"])
def test_files_give_back_the_same_bits(
    model: Small, tokens: torch.Tensor, format: str, tmp_path: Path
) -> None:
    fuseline.quantize(model, format, group_size=32, zero_points=format == "int4")
    path = tmp_path / "model.safetensors"
    save_quantized(model, path)
    torch.manual_seed(7)
    fresh = load_quantized(Small().eval(), path)
    assert torch.equal(fresh(tokens), model(tokens))
    assert fresh.head.weight is fresh.embedding.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    assert not list(tmp_path.glob(".*"))
    load_quantized(fresh, path)  # also over a model that is quantized already
    with torch.device("meta"):
        empty = Small().eval()
    filled = load_quantized(empty, path)  # nothing but what the file holds is ever there
    assert torch.equal(filled(tokens), model(tokens))
    assert filled.head.weight is filled.embedding.weight
    assert saved_about(path) == {"layers": saved_about(path)["layers"]}


def test_files_that_do_not_fit_are_refused(model: Small, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(InputError, match="No layer of this model is quantized"):
        save_quantized(model, path)
    with pytest.raises(InputError, match="There is no file"):
        load_quantized(model, path)
    fuseline.quantize(model, "int8")
    save_quantized(model, path)
    whole = path.read_bytes()
    other = Small()
    other.up = nn.Linear(96, 201)
    kept = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(InputError, match=r"another model: up has inputs, outputs and bias \(96, 200, True\)"):
        load_quantized(other, path)
    other.up = nn.Identity()
    with pytest.raises(InputError, match="it has a linear layer up, and this has none"):
        load_quantized(other, path)
    for length in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match="not a complete safetensors file"):
            load_quantized(Small(), path)
    save_file({"up.weight": torch.ones(3)}, path)
    with pytest.raises(InputError, match="not written by fuseline"):
        load_quantized(Small(), path)
    kind = "fuseline quantized model"
    for said, message in (
        ({"kind": kind, "version": 2}, "version 2"),
        ({"kind": kind, "version": 1, "layers": {"up": {}}, "shared": {}}, "description of the layers"),
        ({"kind": kind, "version": 1, "layers": {}, "shared": {}}, "it has no embedding.weight"),
    ):
        save_file({"up.weight": torch.ones(3)}, path, {"fuseline": json.dumps(said)})
        fresh = Small()
        with pytest.raises(InputError, match=message):
            load_quantized(fresh, path)
        assert isinstance(fresh.up, nn.Linear)
    assert kept.keys() == Small().state_dict().keys()


def test_a_flipped_byte_is_refused_by_name(tmp_path: Path) -> None:
    model = Small().eval()
    fuseline.quantize(model, "int8").save(tmp_path / "x.safetensors")
    content = bytearray((tmp_path / "x.safetensors").read_bytes())
    content[-40] ^= 1
    (tmp_path / "x.safetensors").write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"is damaged: \S+ does not match its checksum"):
        load_quantized(Small().eval(), tmp_path / "x.safetensors")
