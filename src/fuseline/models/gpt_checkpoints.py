"""GPT weights from and to other programs: nanoGPT's `ckpt.pt` and Hugging Face's GPT-2 folders.

Reading executes nothing that a file contains (`weights_only`, safetensors), and checks every name and shape
against the model before it takes one. Writing goes to a temporary name first and is then renamed, so that a
crash or a full disk leaves what was there before. Weights are read as fp32, and written as they are, without
the vocabulary's padding rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from fuseline.errors import InputError, lacks_and_unknown, unknown_name
from fuseline.files.schema import checked
from fuseline.files.torch_files import check_tensors, load_torch
from fuseline.files.writing import Output, written_whole
from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import GPTConfig

# What a reader may choose about a model whose weights are given.
READER_OPTIONS = ("dropout", "vocab_multiple", "attention", "norm", "loss", "activation")

_NANOGPT_PARTS = ("model", "model_args")
_NANOGPT_ARGUMENTS = {
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "embed_dim",
    "block_size": "block_size",
    "vocab_size": "vocab_size",
    "bias": "bias",
    "dropout": "dropout",
}
_TABLES = ("transformer.wte.weight", "lm_head.weight")


def load_nanogpt(path: Path | str, **options: Any) -> GPT:
    """The model of a nanoGPT `ckpt.pt`, on the CPU. `options` set any of `READER_OPTIONS`.

    Checkpoints of nanoGPT before April 2023 were trained with the tanh approximation of GELU; give
    `activation="gelu_tanh"` for those. Raises `InputError` for a file that is truncated, foreign, or whose
    weights do not fit its own `model_args`.
    """
    config, checkpoint = _opened_nanogpt(Path(path), options, whole=True)
    check_tensors(checkpoint["model"], str(path))
    weights = {name.removeprefix("_orig_mod."): weight for name, weight in checkpoint["model"].items()}
    # Without flash attention nanoGPT keeps its causal mask among the weights.
    weights = {name: weight for name, weight in weights.items() if not name.endswith(".attn.bias")}
    return assemble(config, weights, Path(path))


def nanogpt_config(path: Path | str) -> GPTConfig:
    """The shape of the model in a nanoGPT `ckpt.pt`, whose weights are not read; `InputError` as above."""
    return _opened_nanogpt(Path(path), {}, whole=False)[0]


def _opened_nanogpt(path: Path, options: dict[str, Any], *, whole: bool) -> tuple[GPTConfig, dict[str, Any]]:
    checkpoint = load_torch(path, whole=whole)
    if not all(isinstance(checkpoint.get(part), dict) for part in _NANOGPT_PARTS):
        raise InputError(
            f"{path} is not a nanoGPT checkpoint: it lacks `model` or `model_args`. "
            "nanoGPT's train.py writes both to ckpt.pt."
        )
    arguments = checkpoint["model_args"]
    fields = {ours: arguments[theirs] for theirs, ours in _NANOGPT_ARGUMENTS.items() if theirs in arguments}
    place = f"{path}: its model_args do not describe a GPT"
    return checked(GPTConfig, {**fields, **checked_options(options)}, place), checkpoint


def save_nanogpt(
    model: GPT, path: Path | str, *, iteration: int = 0, best_validation_loss: float = math.inf
) -> None:
    """Write the weights as a `ckpt.pt` that nanoGPT's sample.py reads.

    nanoGPT computes exact GELU: a model of another activation is refused, since its logits would change.
    """
    if model.config.activation != "gelu":
        raise InputError(
            f"nanoGPT knows exact GELU only, and this model's activation is {model.config.activation!r}. "
            "Save it in Hugging Face's format."
        )
    arguments = {theirs: getattr(model.config, ours) for theirs, ours in _NANOGPT_ARGUMENTS.items()}
    checkpoint = {
        "model": unpadded_weights(model),
        "model_args": arguments,
        "iter_num": iteration,
        "best_val_loss": best_validation_loss,
        "config": {},
    }
    with written_whole(Path(path)) as part, part.open("wb") as file:
        output = Output(file)
        try:
            torch.save(checkpoint, cast(IO[bytes], output))
        except RuntimeError as error:
            raise output.refused or error from error


def assemble(config: GPTConfig, weights: dict[str, Tensor], source: Path | str) -> GPT:
    """A model of `config` holding `weights` (nanoGPT's names, no padding), checked name by name.

    `source` is what an error names.
    """
    if config.num_layers > len(weights):
        raise InputError(
            f"{source}: its config describes {config.num_layers} layers, and it has {len(weights)} weights. "
            "The file and its config do not belong together."
        )
    with torch.device("meta"):  # no weights are drawn only to be thrown away
        model = GPT(config)
    expected = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    for name in _TABLES:
        expected[name][0] = config.vocab_size
    missing, foreign = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if what := lacks_and_unknown(missing, foreign):
        raise InputError(f"{source} does not hold the weights its config describes: it {what}.")
    for name, weight in weights.items():
        if list(weight.shape) != expected[name]:
            raise InputError(
                f"{source}: {name} is {list(weight.shape)}, and its config makes it {expected[name]}. "
                "The file and its config do not belong together."
            )
    wte, head = (weights[name] for name in _TABLES)
    if wte.data_ptr() != head.data_ptr() and not torch.equal(wte, head):
        raise InputError(f"{source} has a head of its own; GPT-2's is the token embedding (tied weights).")
    padding = config.padded_vocab_size - config.vocab_size
    table = torch.nn.functional.pad(wte.float(), (0, 0, 0, padding))
    owned = {
        name: weight.to(torch.float32, copy=True) for name, weight in weights.items() if name not in _TABLES
    }
    model.load_state_dict({**owned, **dict.fromkeys(_TABLES, table)}, assign=True)
    model.transformer.wte.weight = model.lm_head.weight
    return model


def unpadded_weights(model: GPT) -> dict[str, Tensor]:
    """The state dict without the vocabulary's padding rows, on the CPU; the tied tables share storage."""
    weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    table = weights[_TABLES[0]][: model.config.vocab_size].clone()
    return {**weights, **dict.fromkeys(_TABLES, table)}


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in READER_OPTIONS:
            raise unknown_name("option of a checkpoint's reader", name, READER_OPTIONS)
    return options
