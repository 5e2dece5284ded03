"""A Hugging Face folder as a model with a batch for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fuseline.errors import InputError, first_line
from fuseline.files.schema import read_object, shown
from fuseline.models.hugging_face_schema import LARGEST, MOST_LAYERS
from fuseline.profiling.user_code import Work
from fuseline.timing.memory import available

_SIZE = re.compile(r"size|dim|embd|inner|positions?|heads|experts|d_model|d_ff|d_kv|n_ctx")
_LAYERS = re.compile(r"layers?$")
_GIB = 2**30


def load_folder(folder: Path, *, batch_size: int, seqlen: int, dtype: torch.dtype, train: bool) -> Work:
    """The folder's model with its head, its weights in `dtype`, and a batch [batch_size, seqlen] of random
    token numbers: times do not depend on the words. In training the tokens are also the labels.

    Raises `InputError` for a folder that transformers cannot read, for a model that is larger than this
    machine's memory, and without transformers.
    """
    for name, value in (("batch-size", batch_size), ("seqlen", seqlen)):
        if value < 1:
            raise InputError(f"--{name} {value}: it must be 1 or more.")
    file = folder / "config.json"
    if not file.exists():
        raise InputError(f"{folder} has no config.json: it is no Hugging Face folder.")
    for where, size in _sizes(read_object(file)):
        most = MOST_LAYERS if _LAYERS.search(where) else LARGEST
        if size > most:
            raise InputError(f"{file}: {where} is {shown(size)}; it should be {most} at most.")
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
        _check_memory(kind, config, dtype, folder)
        model: nn.Module = kind.from_pretrained(folder, dtype=dtype)
    except InputError:
        raise
    except Exception as error:  # whatever transformers makes of a file that is not as it should be
        raise InputError(f"{folder}: transformers cannot read it: {_brief(error)}") from error
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and seqlen > longest:
        raise InputError(f"--seqlen {seqlen}: the model in {folder} takes {longest} positions.")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch_size, seqlen), generator=generator)
    names_of_batch = ("input_ids", "labels") if train else ("input_ids",)
    return Work(model.train(train), (tokens,) * len(names_of_batch), names_of_batch, {})


def _sizes(said: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a config that sizes are made of, by their names."""
    for name, value in said.items():
        if isinstance(value, Mapping):
            yield from _sizes(value, f"{inside}{name}.")
        elif isinstance(value, (int, float)) and (_SIZE.search(name) or _LAYERS.search(name)):
            yield f"{inside}{name}", value


def _check_memory(kind: Any, config: Any, dtype: torch.dtype, folder: Path) -> None:
    """Raise `InputError` if the weights do not fit into memory, before any is allocated."""
    with torch.device("meta"):
        model = kind.from_config(config)
    needed = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    room = available(torch.device("cpu"))
    if needed > room:
        raise InputError(
            f"The weights of the model in {folder} take {needed / _GIB:,.0f} GiB, and "
            f"{room / _GIB:,.0f} GiB of memory are free."
        )


def _brief(error: Exception) -> str:
    """The error's type and what it says, on a line of at most 300 characters."""
    text = " ".join(str(error).split())
    said = f"{type(error).__name__}: {text}" if text else first_line(error)
    return said if len(said) <= 300 else f"{said[:297]}..."
