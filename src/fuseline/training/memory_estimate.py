"""How much memory a run will want, before it is begun."""

from __future__ import annotations

from dataclasses import dataclass

from fuseline.models.gpt_config import GPTConfig

# Weight and gradient, and by the way they are kept AdamW's two moments.
_BYTES_A_PARAMETER = 8
_MOMENTS = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 8 / 256}


@dataclass(frozen=True)
class _Kept:
    """Bytes kept for the backward.

    `channel`, for each token and layer: residuals and norms in fp32; q, k, v, attention's output, the MLP
    before and after its activation in the compute dtype. `score`, for each score of an attention that forms
    them. `entry`, for each token and entry of the vocabulary: logits, fp32 copy, log-softmax, gradient.
    """

    channel: int
    score: int
    entry: int


_FULL, _HALF = _Kept(channel=64, score=10, entry=16), _Kept(channel=36, score=6, entry=12)
_KEPT = {"fp32": _FULL, "tf32": _FULL, "bf16": _HALF, "fp16": _HALF, "fp8": _HALF}
_FORMS_SCORES = ("naive", "naive_fused", "math")
# What `fuseline-linear` keeps: rows of logits at a time, and bytes for each entry of them.
_CHUNK_ROWS, _CHUNK_ENTRY = 4096, 5


def training_state_bytes(parameters: int, embedding: int, optimizer_state: str) -> int:
    """Bytes of fp32 weights and gradients and of AdamW's moments. With 8 bits, those of the `embedding`'s
    weights, which count among the `parameters`, stay in fp32."""
    in_full = embedding if optimizer_state == "8bit" else 0
    moments = _MOMENTS["fp32"] * in_full + _MOMENTS[optimizer_state] * (parameters - in_full)
    return round(_BYTES_A_PARAMETER * parameters + moments)


def estimated_bytes(
    config: GPTConfig, parameters: int, batch_size: int, precision: str, optimizer_state: str = "fp32"
) -> int:
    """Bytes that eager training wants at its peak, give or take a quarter.

    GPT-2 124M in bf16 (B=16, T=1024) took 16.0 GiB on an H100 with flash attention and 29.6 with naive; this
    says 16.1 and 29.6. With loss `fuseline-linear` it took 7.9 on an H200; this says 7.8.
    """
    kept = _KEPT[precision]
    tokens = batch_size * config.block_size
    per_token = kept.channel * config.num_layers * config.embed_dim
    logits = kept.entry * tokens
    if config.loss == "fuseline-linear":
        logits = _CHUNK_ENTRY * min(tokens, _CHUNK_ROWS)
    if config.attention in _FORMS_SCORES:
        per_token += kept.score * config.num_layers * config.num_heads * config.block_size
    embedding = (config.padded_vocab_size + config.block_size) * config.embed_dim
    state = training_state_bytes(parameters, embedding, optimizer_state)
    return state + tokens * per_token + logits * config.padded_vocab_size
