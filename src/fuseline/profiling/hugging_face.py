"""A Hugging Face folder as a model with a batch for it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fuseline.errors import InputError, first_line
from fuseline.profiling.user_code import Work


def load_folder(folder: Path, *, batch_size: int, seqlen: int, dtype: torch.dtype, train: bool) -> Work:
    """The folder's model with its head, its weights in `dtype`, and [batch_size, seqlen] token numbers drawn
    at random: times do not go with the words. In training they are their own labels.

    Raises `InputError` for a folder that transformers cannot read, and without transformers.
    """
    for name, value in (("batch-size", batch_size), ("seqlen", seqlen)):
        if value < 1:
            raise InputError(f"--{name} {value}: it must be 1 or more.")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: it is no Hugging Face folder.")
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "A Hugging Face folder needs transformers: pip install 'fuseline[transformers]'."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        names = " ".join(getattr(config, "architectures", None) or ())
        kind = transformers.AutoModelForMaskedLM if "MaskedLM" in names else transformers.AutoModelForCausalLM
        model: nn.Module = kind.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: {first_line(error)}") from error
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and seqlen > longest:
        raise InputError(f"--seqlen {seqlen}: the model in {folder} takes {longest} positions.")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch_size, seqlen), generator=generator)
    names_of_batch = ("input_ids", "labels") if train else ("input_ids",)
    return Work(model.train(train), (tokens,) * len(names_of_batch), names_of_batch, {})
