"""GPT-2 in Hugging Face's format: logits equal to `transformers`' in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuseline.errors import InputError
from fuseline.models.gpt import GPT, GPTConfig
from fuseline.models.gpt_checkpoints import save_nanogpt
from fuseline.models.gpt_hugging_face import load_hugging_face, load_pretrained, save_hugging_face

CONFIG = GPTConfig(
    block_size=16, vocab_size=37, num_layers=2, num_heads=4, embed_dim=32, activation="gelu_tanh"
)
TOKENS = torch.arange(24).view(2, 12)


def fresh(**changes: Any) -> GPT:
    torch.manual_seed(3)
    model = GPT(GPTConfig(**{**vars(CONFIG), **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"vocab_multiple": 64}, {"activation": "gelu"}])
def test_transformers_reads_ours_with_equal_logits(
    tmp_path: Path, transformers: Any, changes: dict[str, Any]
) -> None:
    model = fresh(**changes)
    save_hugging_face(model, tmp_path)
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(theirs.eval()(TOKENS).logits, model(TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_transformers_own_model_reads_with_equal_logits(
    tmp_path: Path, transformers: Any, shard: str
) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=37, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == "5GB")
    model = load_hugging_face(tmp_path, vocab_multiple=64).eval()
    assert model.config == GPTConfig(**{**vars(CONFIG), "vocab_multiple": 64})
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_roundtrip_through_folder_and_file(tmp_path: Path) -> None:
    model = fresh()
    save_hugging_face(model, tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        loaded = load_pretrained(path).eval()
        assert loaded.config == model.config
        assert torch.equal(loaded(TOKENS), model(TOKENS))
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_load_pretrained_takes_nanogpts_file_too(tmp_path: Path) -> None:
    model = fresh(activation="gelu")
    save_nanogpt(model, tmp_path / "ckpt.pt")
    assert torch.equal(load_pretrained(tmp_path / "ckpt.pt")(TOKENS), model(TOKENS))


def test_openais_names_without_prefix_and_with_masks(tmp_path: Path) -> None:
    model = fresh()
    save_hugging_face(model, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name.removeprefix("transformer."): weight for name, weight in load_file(file).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    save_file(weights, file)
    assert torch.equal(load_hugging_face(tmp_path)(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"n_inner": 100}, "n_inner is 100"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"activation_function": "relu"}, "'relu' is not one of"),
        ({"n_layer": 3}, r"lacks transformer\.h\.2"),
        ({"n_embd": 64}, "do not belong together"),
        ({"vocab_size": 36}, "do not belong together"),
        ({"n_head": "four"}, "does not describe a GPT-2"),
    ],
)
def test_other_architectures_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_hugging_face(fresh(), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(InputError, match=message):
        load_hugging_face(tmp_path)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no file .*config\.json"):
        load_hugging_face(tmp_path)
    save_hugging_face(fresh(), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 5, len(whole) // 2):
        file.write_bytes(whole[:length])
        with pytest.raises(InputError, match="cut off"):
            load_hugging_face(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="save the model anew"):
        load_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        load_hugging_face(tmp_path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    save_hugging_face(fresh(), inside)
    (inside / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"wte.weight": "../outside.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"inside/outside\.safetensors"):
        load_hugging_face(inside)
