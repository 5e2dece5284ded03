"""GPT weights from and to other programs: nanoGPT's `ckpt.pt` and Hugging Face's GPT-2 folders.

Reading executes nothing that a file contains (`weights_only`, safetensors), and checks every name and shape
against the model before it takes one. Writing goes to a temporary name first and is then renamed, so that a
crash or a full disk leaves what was there before. Weights are read as fp32, and written as they are, without
the vocabulary's padding rows.
"""

from __future__ import annotations

import math
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fuseline.errors import InputError, first_line, lacks_and_unknown, unknown_name
from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import GPTConfig

# What a reader may choose about a model whose weights are given.
READER_OPTIONS = ("dropout", "vocab_multiple", "attention", "norm", "activation")

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
    config, checkpoint = _opened_nanogpt(Path(path), options)
    weights = {name.removeprefix("_orig_mod."): weight for name, weight in checkpoint["model"].items()}
    # Without flash attention nanoGPT keeps its causal mask among the weights.
    weights = {name: weight for name, weight in weights.items() if not name.endswith(".attn.bias")}
    return assemble(config, weights, Path(path))


def nanogpt_config(path: Path | str) -> GPTConfig:
    """The shape of the model in a nanoGPT `ckpt.pt`, whose weights are not read; `InputError` as above."""
    return _opened_nanogpt(Path(path), {})[0]


def _opened_nanogpt(path: Path, options: dict[str, Any]) -> tuple[GPTConfig, dict[str, Any]]:
    if not path.is_file():
        raise InputError(f"There is no checkpoint at {path}.")
    if not zipfile.is_zipfile(path):
        raise InputError(
            f"{path} is not a PyTorch checkpoint, or was cut off while it was written or copied."
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise InputError(f"Cannot read {path} as a PyTorch checkpoint: {first_line(error)}") from error
    if not (
        isinstance(checkpoint, dict) and all(isinstance(checkpoint.get(k), dict) for k in _NANOGPT_PARTS)
    ):
        raise InputError(
            f"{path} is not a nanoGPT checkpoint: it lacks `model` or `model_args`. "
            "nanoGPT's train.py writes both to ckpt.pt."
        )
    arguments = checkpoint["model_args"]
    try:
        fields = {
            ours: arguments[theirs] for theirs, ours in _NANOGPT_ARGUMENTS.items() if theirs in arguments
        }
        config = GPTConfig(**{**fields, **checked_options(options)})
    except TypeError as error:
        raise InputError(f"{path}: model_args {arguments!r} do not describe a GPT: {error}") from error
    return config, checkpoint


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
    with written_whole(Path(path)) as part:
        torch.save(checkpoint, part)


def assemble(config: GPTConfig, weights: dict[str, Tensor], source: Path) -> GPT:
    """A model of `config` holding `weights` (nanoGPT's names, no padding), checked name by name.

    `source` is what an error names.
    """
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


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which becomes `path` at the end, or is removed if the writing fails."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # torch.save tells a full disk by a RuntimeError
        raise InputError(
            f"Cannot write {path}: {first_line(error)}. Is the disk full? What was there before is unharmed."
        ) from error
    finally:
        part.unlink(missing_ok=True)


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in READER_OPTIONS:
            raise unknown_name("option of a checkpoint's reader", name, READER_OPTIONS)
    return options
