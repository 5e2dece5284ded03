"""Decoders after LLaMA's pattern: a gated MLP, rotary positions, a norm before (or after) each branch."""

from __future__ import annotations

from typing import Any

from .architecture import FromTransformers, Model
from .batches import VOCABULARY, causal

_GROUPED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def _model(name: str, prefix: str, config_class: str = "", **config: Any) -> Model:
    return Model(
        name=name,
        make=FromTransformers(
            f"{prefix}ForCausalLM", config_class or f"{prefix}Config", {**_GROUPED, **config}
        ),
        batch=causal,
        family="decoder",
        llama_like=True,
        left_padding=True,
    )


LLAMA_LIKE = (
    _model("llama", "Llama"),
    _model("qwen2", "Qwen2", tie_word_embeddings=True),
    _model("qwen3", "Qwen3", head_dim=32),
    _model("gemma", "Gemma", num_key_value_heads=1, head_dim=16),
    _model("gemma2", "Gemma2", head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
    _model(
        "gemma3",
        "Gemma3",
        "Gemma3TextConfig",
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _model("phi3", "Phi3"),
    _model("cohere", "Cohere"),
    _model("olmo2", "Olmo2"),
    _model("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    _model(
        "gpt_oss",
        "GptOss",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
)
