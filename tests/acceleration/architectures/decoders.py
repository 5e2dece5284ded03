"""Decoders that are not after LLaMA's pattern: other positions, norms, MLPs, or no attention at all."""

from __future__ import annotations

from typing import Any

from .architecture import FromTransformers, Model
from .batches import VOCABULARY, causal

_TOKENS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}

_PLAIN: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

_GPT: dict[str, Any] = {**_TOKENS, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}


def _model(name: str, model_class: str, config_class: str, config: dict[str, Any], **options: Any) -> Model:
    return Model(
        name=name,
        make=FromTransformers(model_class, config_class, config),
        batch=causal,
        family="decoder",
        **{"left_padding": True, **options},
    )


DECODERS = (
    _model("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT),
    _model("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", {**_PLAIN, "intermediate_size": 128}),
    _model("gptj", "GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 8}),
    _model("opt", "OPTForCausalLM", "OPTConfig", {**_PLAIN, "ffn_dim": 128, "word_embed_proj_dim": 32}),
    _model(
        "bloom", "BloomForCausalLM", "BloomConfig", {**_TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    ),
    _model("falcon", "FalconForCausalLM", "FalconConfig", _PLAIN),
    _model(
        "mpt",
        "MptForCausalLM",
        "MptConfig",
        {**_TOKENS, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 2},
    ),
    _model("phi", "PhiForCausalLM", "PhiConfig", {**_PLAIN, "intermediate_size": 128}),
    _model(
        "starcoder2",
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        {**_PLAIN, "intermediate_size": 128, "num_key_value_heads": 2, "sliding_window": 8},
    ),
    _model(
        "mamba",
        "MambaForCausalLM",
        "MambaConfig",
        {**_TOKENS, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    ),
)
