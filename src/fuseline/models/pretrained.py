"""A model of any kind from a folder or a file, whatever wrote it."""

from __future__ import annotations

from pathlib import Path

import torch

from fuseline.errors import InputError
from fuseline.files.reading import is_there
from fuseline.files.schema import shown
from fuseline.models.gpt import GPT
from fuseline.models.gpt_checkpoints import load_nanogpt
from fuseline.models.gpt_hugging_face import load_hugging_face
from fuseline.models.llama import Llama
from fuseline.models.llama_hugging_face import MODEL_TYPES, load_llama
from fuseline.models.weight_files import CONFIG, read_config_file

LanguageModel = GPT | Llama


def load_model(
    path: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LanguageModel:
    """The language model at `path`: a folder or `.safetensors` file of Hugging Face's format (GPT-2, Llama,
    Mistral, Qwen2, Qwen3), or nanoGPT's checkpoint. In eval mode, on `device`; in the dtype of its weights
    if `dtype` is None, but GPT-2 in fp32.

    Raises `InputError` for what cannot be read.
    """
    path = Path(path)
    if not is_there(path):
        raise InputError(f"There is no model at {path}.")
    if not path.is_dir() and path.suffix != ".safetensors":
        return load_nanogpt(path).to(device=device, dtype=dtype).eval()
    kind = read_config_file((path if path.is_dir() else path.parent) / CONFIG).get("model_type", "gpt2")
    if kind in MODEL_TYPES:
        return load_llama(path, dtype=dtype, device=device)
    if kind == "gpt2":
        return load_hugging_face(path).to(device=device, dtype=dtype).eval()
    raise InputError(f"{path}: model_type is {shown(kind)}. Fuseline reads gpt2, {', '.join(MODEL_TYPES)}.")
