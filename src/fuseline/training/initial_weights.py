"""The model a run begins with: fresh, or with weights trained before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fuseline.errors import InputError
from fuseline.models.gpt import GPT
from fuseline.models.gpt_hugging_face import load_pretrained
from fuseline.training.checkpoint import BEST, LATEST, is_ours, load_weights
from fuseline.training.config import TrainConfig
from fuseline.training.schema import changed

# What pretrained weights decide, whatever the configuration says.
SHAPE_FIELDS = ("num_layers", "num_heads", "embed_dim", "bias", "activation")


def fresh_model(config: TrainConfig, vocab_size: int) -> GPT:
    """A model drawn from `config.seed`, on the CPU, so that every device begins with the same weights."""
    torch.manual_seed(config.seed)
    return GPT(config.model_config(vocab_size))


def pretrained_model(config: TrainConfig, path: Path, vocab_size: int) -> tuple[GPT, TrainConfig]:
    """The model at `path`, cropped to `config.block_size`, and `config` with the shape that it has.

    `path` is a run's folder (its best weights), a checkpoint of ours or of nanoGPT, or a GPT-2 in Hugging
    Face's format.

    Raises:
        InputError: the file cannot be read, or does not go with the data's vocabulary or the block size.
    """
    options: dict[str, Any] = {
        "dropout": config.dropout,
        "vocab_multiple": config.vocab_multiple,
        "attention": config.attention,
        "norm": config.norm,
        "loss": config.loss,
    }
    found = next((path / name for name in (BEST, LATEST) if (path / name).is_file()), path)
    if found.suffix == ".pt" and is_ours(found):
        model = load_weights(found, **options)
    else:
        model = load_pretrained(found, **options)
    shape = model.config
    if shape.vocab_size != vocab_size:
        raise InputError(
            f"{found} knows {shape.vocab_size} tokens, and tokenizer {config.tokenizer!r} makes {vocab_size} "
            "of this data. Choose the tokenizer that the weights were trained with (GPT-2: --tokenizer gpt2)."
        )
    if config.block_size > shape.block_size:
        raise InputError(
            f"block_size {config.block_size} is longer than the {shape.block_size} positions of {found}. "
            f"Take --seqlen {shape.block_size} or less."
        )
    model.crop_block_size(config.block_size)
    torch.manual_seed(config.seed)
    return model, changed(config, {name: getattr(shape, name) for name in SHAPE_FIELDS})
