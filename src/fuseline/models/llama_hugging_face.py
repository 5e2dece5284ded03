"""Llama, Mistral, Qwen2 and Qwen3 in Hugging Face's format: folders of `config.json` and safetensors.

`transformers` is not needed. Theirs keeps queries, keys and values apart, and gate and up; ours holds each
group as one matrix, so their weights are copied into its rows. A weight is read, checked, copied and let go
before the next: a model takes its own memory and that of its largest weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseline.errors import InputError, lacks_and_unknown
from fuseline.files.schema import checked_values, shown
from fuseline.files.torch_files import check_tensors, save_tensors
from fuseline.files.writing import written_whole
from fuseline.models.hugging_face_schema import LlamaSaid, RopeSaid
from fuseline.models.llama import Llama, check_positions
from fuseline.models.llama_config import LlamaConfig, RopeScaling
from fuseline.models.weight_files import (
    CONFIG,
    WEIGHTS,
    check_size,
    each_weight,
    read_config_file,
)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

_SIZES = {
    "max_position_embeddings": "block_size",
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "hidden_size": "embed_dim",
    "intermediate_size": "ffn_dim",
}
_NOT_WEIGHTS = (".rotary_emb.inv_freq",)
Rows = Callable[[Tensor], Tensor]


def load_llama(
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    block_size: int | None = None,
    kernels: str = "fuseline",
) -> Llama:
    """The model of a folder with `config.json` and `model.safetensors` (whole, or in shards with an index),
    or of one `.safetensors` file with a `config.json` beside it.

    `dtype` is that of the weights' file if None; `block_size` crops the context. Raises `InputError` for
    files that are missing, truncated or foreign, for weights that are not those of the config, and for
    variants that this model is not.
    """
    path = Path(path)
    config = read_config(path, block_size=block_size, kernels=kernels)
    check_size(path, config.num_weights)
    return fill_llama(config, each_weight(path), path, dtype=dtype, device=device)


def fill_llama(
    config: LlamaConfig,
    weights: Iterable[tuple[str, Tensor]],
    source: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Llama:
    """A model of `config` with copies of `weights`, which have their names; `source` is what an error names.
    In eval mode; in the dtype of the first weight if `dtype` is None."""
    check_positions(config, source)
    with torch.device("meta"):
        model = Llama(config)
    found = places(config)
    wanted = dict(model.state_dict())
    filled: dict[str, int] = dict.fromkeys(wanted, 0)
    foreign = []
    ready = False
    for name, weight in weights:
        if name.endswith(_NOT_WEIGHTS):
            continue
        if name == "lm_head.weight" and config.tied:
            continue  # the embedding under a second name
        place = found.get(name if name == "lm_head.weight" else f"model.{name.removeprefix('model.')}")
        if place is None:
            foreign.append(name)
            continue
        check_tensors({name: weight}, str(source))
        if not ready:
            model.allot(device, weight.dtype if dtype is None else dtype)
            wanted, ready = dict(model.state_dict()), True
        ours, rows = place
        target = rows(wanted[ours])
        if target.shape != weight.shape:
            raise InputError(
                f"{source}: {name} is {list(weight.shape)}, and its config makes it {list(target.shape)}. "
                "The file and its config do not belong together."
            )
        target.copy_(weight)
        filled[ours] += weight.numel()
    if config.tied:
        filled["head.weight"] = wanted["head.weight"].numel()
    missing = [
        name for name, (ours, _) in found.items() if ours in filled and filled[ours] != wanted[ours].numel()
    ]
    if what := lacks_and_unknown(missing, foreign):
        raise InputError(f"{source} does not hold the weights its config describes: it {what}.")
    return model.eval()


def save_llama(model: Llama, folder: Path | str) -> None:
    """Write `config.json` and `model.safetensors` as `transformers` reads them."""
    config, state = model.config, model.state_dict()
    theirs = {
        name: rows(state[ours]).detach().cpu().contiguous().clone()
        for name, (ours, rows) in places(config).items()
        if ours in state and not (config.tied and name == "lm_head.weight")
    }
    folder = Path(folder)
    save_tensors(theirs, folder / WEIGHTS, {"format": "pt"})
    with written_whole(folder / CONFIG) as part:
        part.write_text(json.dumps(described(config), indent=2) + "\n", encoding="utf-8")


def read_config(path: Path | str, *, block_size: int | None = None, kernels: str = "fuseline") -> LlamaConfig:
    """The config of a folder, or of the folder a weights' file is in."""
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / CONFIG
    return llama_config(read_config_file(file), file, block_size=block_size, kernels=kernels)


def llama_config(
    fields: Mapping[str, Any],
    file: Path | str,
    *,
    block_size: int | None = None,
    kernels: str = "fuseline",
) -> LlamaConfig:
    """The config that the fields of a `config.json` describe; `file` is what an error names."""
    kind = fields.get("model_type")
    if kind not in MODEL_TYPES:
        raise InputError(f"{file}: model_type is {shown(kind)}, and this model is {', '.join(MODEL_TYPES)}.")
    if fields.get("hidden_act", "silu") != "silu":
        raise InputError(f"{file}: hidden_act is {shown(fields['hidden_act'])}, and this model's is 'silu'.")
    if "quantization_config" in fields:
        raise InputError(f"{file}: the weights are quantized already; load the model they were made from.")
    said = checked_values(LlamaSaid, fields, f"{file} does not describe a Llama")
    rope = said.rope_parameters or said.rope_scaling or RopeSaid()
    biased = bool(said.attention_bias)
    try:
        config = LlamaConfig(
            **{ours: getattr(said, name) for name, ours in _SIZES.items()},
            num_kv_heads=said.num_key_value_heads or said.num_attention_heads,
            head_dim=said.head_dim or 0,
            rope_base=rope.rope_theta or said.rope_theta or 10000.0,
            rope_scaling=_scaling(rope),
            eps=said.rms_norm_eps,
            qkv_bias=True if kind == "qwen2" else biased,
            out_bias=False if kind == "qwen2" else biased,
            mlp_bias=bool(said.mlp_bias),
            qk_norm=kind == "qwen3",
            tied=bool(said.tie_word_embeddings),
            kernels=kernels,
            **_window(said, file),
        )
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    if block_size is not None and block_size > config.block_size:
        raise InputError(f"{file}: the model's context is {config.block_size} positions, not {block_size}.")
    return config if block_size is None else LlamaConfig(**{**vars(config), "block_size": block_size})


def _scaling(rope: RopeSaid) -> RopeScaling:
    """The schema has seen to it that what a kind needs is there."""
    if rope.rope_type == "default":
        return RopeScaling()
    given = {
        "factor": rope.factor,
        "low_factor": rope.low_freq_factor,
        "high_factor": rope.high_freq_factor,
        "original_length": rope.original_max_position_embeddings,
    }
    names = ("factor",) if rope.rope_type == "linear" else tuple(given)
    return RopeScaling(rope.rope_type, **{name: given[name] for name in names})  # type: ignore[arg-type]


def _window(said: LlamaSaid, file: Path | str) -> dict[str, Any]:
    """The window and the first layer that has it; every layer before has none, every one after has it."""
    layers, window, kind = said.num_hidden_layers, said.sliding_window, said.model_type
    first = 0
    if kind in ("qwen2", "qwen3"):
        if not said.use_sliding_window:
            return {}
        first = layers if said.max_window_layers is None else said.max_window_layers
    elif kind == "llama":
        return {}
    types = said.layer_types
    if types and kind != "mistral":
        first = types.index("sliding_attention") if "sliding_attention" in types else layers
        if types != ["full_attention"] * first + ["sliding_attention"] * (layers - first):
            raise InputError(f"{file}: layer_types mix windowed layers and whole ones in an unknown pattern.")
    return {"window": window, "first_windowed_layer": first} if window and first < layers else {}


def places(config: LlamaConfig) -> dict[str, tuple[str, Rows]]:
    """Their names, and where each stands with us: the name, and the rows of it."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        "self_attn.q_proj": ("attention.qkv", 0, queries),
        "self_attn.k_proj": ("attention.qkv", queries, keys),
        "self_attn.v_proj": ("attention.qkv", queries + keys, keys),
        "self_attn.o_proj": ("attention.out", 0, config.embed_dim),
        "mlp.gate_proj": ("mlp.gate_up", 0, config.ffn_dim),
        "mlp.up_proj": ("mlp.gate_up", config.ffn_dim, config.ffn_dim),
        "mlp.down_proj": ("mlp.down", 0, config.embed_dim),
        "input_layernorm": ("attention.norm", 0, config.embed_dim),
        "post_attention_layernorm": ("mlp.norm", 0, config.embed_dim),
    }
    if config.qk_norm:
        parts["self_attn.q_norm"] = ("attention.q_norm", 0, config.head_dim)
        parts["self_attn.k_norm"] = ("attention.k_norm", 0, config.head_dim)
    biased = {"attention.qkv": config.qkv_bias, "attention.out": config.out_bias}
    biased |= dict.fromkeys(("mlp.gate_up", "mlp.down"), config.mlp_bias)
    whole: Rows = lambda weight: weight  # noqa: E731
    places: dict[str, tuple[str, Rows]] = {
        "model.embed_tokens.weight": ("embedding.weight", whole),
        "model.norm.weight": ("norm.weight", whole),
        "lm_head.weight": ("head.weight", whole),
    }
    for layer in range(config.num_layers):
        for name, (ours, first, count) in parts.items():
            rows = _rows(first, count)
            for kind in ("weight", "bias") if biased.get(ours) else ("weight",):
                places[f"model.layers.{layer}.{name}.{kind}"] = (f"blocks.{layer}.{ours}.{kind}", rows)
    return places


def _rows(first: int, count: int) -> Rows:
    return lambda weight: weight.narrow(0, first, count)


def described(config: LlamaConfig) -> dict[str, Any]:
    """The config as `transformers` writes it."""
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias and not config.out_bias else "llama"
    kind = "mistral" if kind == "llama" and config.window else kind
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": scaling.kind, "rope_theta": config.rope_base}
    if scaling.kind != "default":
        rope["factor"] = scaling.factor
    if scaling.kind == "llama3":
        rope["low_freq_factor"], rope["high_freq_factor"] = scaling.low_factor, scaling.high_factor
        rope["original_max_position_embeddings"] = scaling.original_length
    said: dict[str, Any] = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        **{name: getattr(config, ours) for name, ours in _SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_base,
        "rope_parameters": rope,
        "rope_scaling": rope if scaling.kind != "default" else None,
        "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied,
        "sliding_window": config.window,
    }
    if kind in ("qwen2", "qwen3"):
        said["use_sliding_window"] = config.window is not None
        said["max_window_layers"] = config.first_windowed_layer
    return said
