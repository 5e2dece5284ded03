"""GPT-2 in Hugging Face's format: a folder of `config.json` and safetensors, read and written.

`transformers` is not needed. Its GPT-2 keeps linear weights as [in, out] (its `Conv1D`), ours as [out, in],
so four weights a layer are transposed on the way. Its GELU is the tanh approximation (`gelu_new`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseline.errors import InputError
from fuseline.files.schema import checked_values, shown
from fuseline.files.torch_files import check_tensors, save_tensors
from fuseline.files.writing import written_whole
from fuseline.models.gpt import GPT
from fuseline.models.gpt_checkpoints import (
    assemble,
    checked_options,
    load_nanogpt,
    unpadded_weights,
)
from fuseline.models.gpt_config import GPTConfig
from fuseline.models.hugging_face_schema import GPT2Said
from fuseline.models.weight_files import CONFIG, WEIGHTS, check_size, each_weight, read_config_file

_CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_MASKS = (".attn.bias", ".attn.masked_bias")
_SIZES = {
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "embed_dim",
    "n_positions": "block_size",
    "vocab_size": "vocab_size",
}
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
# What their config can say and our model does not do, with the only value that is the same to both.
_FIXED = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def load_pretrained(path: Path | str, **options: Any) -> GPT:
    """A GPT of either format: a folder or `.safetensors` file is Hugging Face's, another file nanoGPT's."""
    path = Path(path)
    hugging_face = path.is_dir() or path.suffix == ".safetensors"
    return load_hugging_face(path, **options) if hugging_face else load_nanogpt(path, **options)


def load_hugging_face(path: Path | str, **options: Any) -> GPT:
    """The GPT-2 of a folder with `config.json` and `model.safetensors` (whole, or in shards with an index),
    or of one `.safetensors` file with a `config.json` beside it. On the CPU, in fp32, dropout 0.

    `options` set any of `gpt_checkpoints.READER_OPTIONS`. Raises `InputError` for files that are missing,
    truncated, foreign, or of a GPT-2 variant that this model is not.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    config = read_config(folder, **options)
    check_size(path, config.num_weights)
    weights = to_nanogpt(dict(each_weight(path)))
    check_tensors(weights, str(path))
    return assemble(config, weights, path)


def save_hugging_face(model: GPT, folder: Path | str) -> None:
    """Write `config.json` and `model.safetensors` as `GPT2LMHeadModel.from_pretrained` reads them.

    A model without biases gets zero biases, which compute the same.
    """
    config = model.config
    weights = unpadded_weights(model)
    head = weights.pop("lm_head.weight")
    theirs = {}
    for name, weight in weights.items():
        theirs[name] = weight.T.contiguous() if name.endswith(_CONV1D) else weight
        if not config.bias and not name.endswith(("wte.weight", "wpe.weight")):
            theirs[name.removesuffix("weight") + "bias"] = torch.zeros(weight.shape[0], dtype=weight.dtype)
    description: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"],
        **_FIXED,
        **{name: getattr(config, ours) for name, ours in _SIZES.items()},
        "activation_function": "gelu_new" if config.activation == "gelu_tanh" else "gelu",
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout),
        # The last token of GPT-2's own vocabulary ends a text; other vocabularies have no such token.
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 50256 if config.vocab_size == 50257 else None),
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    folder = Path(folder)
    save_tensors(theirs, folder / WEIGHTS, {"format": "pt"})
    with written_whole(folder / CONFIG) as part:
        part.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path, **options: Any) -> GPTConfig:
    """The shape that `config.json` in `folder` describes; `options` as for `load_hugging_face`."""
    path = folder / CONFIG
    return gpt2_config(read_config_file(path), path, **options)


def gpt2_config(fields: Mapping[str, Any], path: Path | str, **options: Any) -> GPTConfig:
    """The same of the fields of a `config.json`; `path` is what an error names."""
    for name, value in _FIXED.items():
        if fields.get(name, value) != value:
            raise InputError(
                f"{path}: {name} is {shown(fields[name])}, and this GPT-2 has {value!r}. It cannot be loaded."
            )
    said = checked_values(GPT2Said, fields, f"{path} does not describe a GPT-2")
    activation = said.activation_function
    if activation not in _ACTIVATIONS:
        raise InputError(
            f"{path}: activation_function {shown(activation)} is not one of {', '.join(_ACTIVATIONS)}."
        )
    if said.n_inner not in (None, 4 * said.n_embd):
        raise InputError(f"{path}: n_inner is {said.n_inner}, and this GPT-2 has 4 x {said.n_embd}.")
    sizes = {ours: getattr(said, name) for name, ours in _SIZES.items()}
    try:
        return GPTConfig(**{**sizes, "activation": _ACTIVATIONS[activation], **checked_options(options)})
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def to_nanogpt(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their names to nanoGPT's; the [in, out] weights transposed; causal masks left out."""
    ours = {}
    for name, weight in weights.items():
        if name.endswith(_MASKS):
            continue
        if name != "lm_head.weight" and not name.startswith("transformer."):
            name = f"transformer.{name}"
        ours[name] = weight.T if name.endswith(_CONV1D) else weight
    # One table under two names is stored once.
    if "transformer.wte.weight" in ours:
        ours.setdefault("lm_head.weight", ours["transformer.wte.weight"])
    return ours
