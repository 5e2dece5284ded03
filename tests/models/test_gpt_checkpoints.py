"""nanoGPT's checkpoints: what is written reads back, what is broken is named."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.errors import InputError
from fuseline.models.gpt import GPT, GPTConfig
from fuseline.models.gpt_checkpoints import load_nanogpt, save_nanogpt
from fuseline.models.gpt_hugging_face import save_hugging_face

CONFIG = GPTConfig(block_size=16, vocab_size=37, num_layers=2, num_heads=4, embed_dim=32, bias=False)
TOKENS = torch.arange(24).view(2, 12)


def fresh(config: GPTConfig = CONFIG) -> GPT:
    torch.manual_seed(3)
    return GPT(config).eval()


def nanogpt_checkpoint() -> dict[str, Any]:
    """As nanoGPT's train.py writes it from a compiled model."""
    weights = {f"_orig_mod.{name}": weight for name, weight in fresh().state_dict().items()}
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    return {
        "model": weights,
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": {
            "n_layer": 2,
            "n_head": 4,
            "n_embd": 32,
            "block_size": 16,
            "bias": False,
            "vocab_size": 37,
            "dropout": 0.1,
        },
        "iter_num": 250,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare_char", "compile": True},
    }


def test_nanogpts_own_checkpoint_loads(tmp_path: Path) -> None:
    torch.save(nanogpt_checkpoint(), tmp_path / "ckpt.pt")
    model = load_nanogpt(tmp_path / "ckpt.pt").eval()
    assert model.config == GPTConfig(**{**vars(CONFIG), "dropout": 0.1})
    assert torch.equal(model(TOKENS), fresh()(TOKENS))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("vocab_multiple", [1, 64])
def test_roundtrip_keeps_weights_and_drops_padding(tmp_path: Path, vocab_multiple: int) -> None:
    model = fresh(GPTConfig(**{**vars(CONFIG), "vocab_multiple": vocab_multiple}))
    path = tmp_path / "new" / "ckpt.pt"
    save_nanogpt(model, path, iteration=7, best_validation_loss=2.5)
    stored = torch.load(path, weights_only=True)
    assert stored["model"]["lm_head.weight"].shape == (37, 32)
    assert (stored["iter_num"], stored["best_val_loss"]) == (7, 2.5)
    assert stored["model_args"] == nanogpt_checkpoint()["model_args"] | {"dropout": 0.0}
    for multiple in (1, 8):
        loaded = load_nanogpt(path, vocab_multiple=multiple, attention="math").eval()
        assert loaded.config.attention == "math"
        torch.testing.assert_close(loaded(TOKENS), model(TOKENS))
    assert list(path.parent.iterdir()) == [path]


def test_loaded_weights_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    save_nanogpt(fresh(), path)
    model = load_nanogpt(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(model(TOKENS), fresh()(TOKENS))


def _without(checkpoint: dict[str, Any], name: str) -> dict[str, Any]:
    del checkpoint["model"][f"_orig_mod.{name}"]
    return checkpoint


def _with(checkpoint: dict[str, Any], name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    checkpoint["model"][f"_orig_mod.{name}"] = torch.zeros(shape)
    return checkpoint


def _arguments(checkpoint: dict[str, Any], **changes: object) -> dict[str, Any]:
    checkpoint["model_args"].update(changes)
    return checkpoint


@pytest.mark.parametrize(
    "spoil,message",
    [
        (lambda c: c["model"], "not a nanoGPT checkpoint"),
        (lambda c: [1, 2], "not a nanoGPT checkpoint"),
        (lambda c: _without(c, "transformer.h.1.mlp.c_fc.weight"), r"lacks transformer\.h\.1\.mlp\.c_fc"),
        (lambda c: _with(c, "transformer.h.2.ln_1.weight", (32,)), r"unknown transformer\.h\.2\.ln_1"),
        (
            lambda c: _with(c, "transformer.wpe.weight", (8, 32)),
            r"is \[8, 32\], and its config makes it \[16",
        ),
        (lambda c: _with(c, "lm_head.weight", (37, 32)), "a head of its own"),
        (lambda c: _arguments(c, n_head=5), "cannot be split among 5 heads"),
        (lambda c: _arguments(c, n_layer="two"), "do not describe a GPT"),
        (lambda c: {**c, "config": GPTConfig}, "Cannot read"),
    ],
)
def test_foreign_checkpoints_are_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], Any], message: str
) -> None:
    torch.save(spoil(nanogpt_checkpoint()), tmp_path / "ckpt.pt")
    with pytest.raises(InputError, match=message):
        load_nanogpt(tmp_path / "ckpt.pt")


def test_truncated_and_absent_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    with pytest.raises(InputError, match="There is no file"):
        load_nanogpt(path)
    save_nanogpt(fresh(), path)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match="cut off"):
            load_nanogpt(path)


def test_only_the_reader_options_can_be_chosen(tmp_path: Path) -> None:
    save_nanogpt(fresh(), tmp_path / "ckpt.pt")
    with pytest.raises(InputError, match="no option of a checkpoint's reader named 'num_layers'"):
        load_nanogpt(tmp_path / "ckpt.pt", num_layers=1)


def test_nanogpt_gets_no_tanh_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exact GELU only"):
        save_nanogpt(fresh(GPTConfig(**{**vars(CONFIG), "activation": "gelu_tanh"})), tmp_path / "ckpt.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("save", [save_nanogpt, save_hugging_face])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, save: Callable[[GPT, Path], None]) -> None:
    path = tmp_path / "saved"
    save(fresh(), path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # writes beyond fail, as on a full disk
    try:
        with pytest.raises(InputError, match=r"Cannot write .*saved"):
            save(fresh(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
