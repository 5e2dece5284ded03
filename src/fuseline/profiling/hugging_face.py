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
    """The folder's model with its head, its weights in `dtype`, and a random batch: times do not depend on
    the words. The batch is [batch_size, seqlen] token ids, which in training are also the labels of a
    language model, or `batch_size` images. A classifier's labels are random classes.

    Raises `InputError` if transformers is not installed or cannot read the folder, and if the model takes
    other inputs (sounds, for example) or is larger than this machine's memory.
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
        kind = _kind(config)
        _check_memory(kind, config, dtype, folder)
        model: nn.Module = kind.from_pretrained(folder, dtype=dtype)
    except InputError:
        raise
    except Exception as error:  # whatever transformers makes of a file that is not as it should be
        raise InputError(f"{folder}: transformers cannot read it: {_brief(error)}") from error
    wanted = getattr(model, "main_input_name", "input_ids")
    if wanted not in ("input_ids", "pixel_values"):
        raise InputError(
            f"The model in {folder} takes {wanted}, but this command makes batches of tokens and of images "
            "only. Write a function that returns (model, batch), and give it as MODULE:FUNCTION."
        )
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if wanted == "input_ids" and isinstance(longest, int) and seqlen > longest:
        raise InputError(f"--seqlen {seqlen}: the model in {folder} takes {longest} positions.")
    generator = torch.Generator().manual_seed(0)
    if wanted == "input_ids":
        inputs = torch.randint(text.vocab_size, (batch_size, seqlen), generator=generator)
    else:
        height, width = _pair(getattr(config, "image_size", 224))
        channels = getattr(config, "num_channels", 3)
        inputs = torch.randn(batch_size, channels, height, width, generator=generator).to(dtype)
    batch = {wanted: inputs}
    if train:
        batch |= _labels(type(model).__name__, inputs, config, generator)
    return Work(model.train(train), tuple(batch.values()), tuple(batch), {})


_HEADS = ("MaskedLM", "ConditionalGeneration", "MTModel", "Classification", "CTC")
"""Models with one of these in their name are built as the folder says, others as causal language models."""


def _kind(config: Any) -> Any:
    """The class of transformers that makes the model of a config."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        if any(head in name for head in _HEADS) and hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM


def _labels(
    name: str, inputs: torch.Tensor, config: Any, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    if "Classification" not in name:
        return {"labels": inputs} if not inputs.is_floating_point() else {}
    shape = inputs.shape if "Token" in name else inputs.shape[:1]
    if config.num_labels == 1:  # transformers then computes a regression loss
        return {"labels": torch.rand(shape, generator=generator)}
    return {"labels": torch.randint(config.num_labels, shape, generator=generator)}


def _pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


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
        make = getattr(kind, "from_config", None) or kind._from_config
        model = make(config)
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
