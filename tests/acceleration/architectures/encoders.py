"""Encoders, and models of an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .architecture import FromTransformers, Model
from .batches import VOCABULARY, classified, masked, replaced, translated

_TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_BERT: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}

_BART: dict[str, Any] = {
    **_TOKENS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "use_cache": False,
}


def _encoder(
    name: str, prefix: str, config: dict[str, Any], task: str = "ForMaskedLM", batch: Callable = masked
) -> Model:
    make = FromTransformers(f"{prefix}{task}", f"{prefix}Config", config)
    return Model(name=name, make=make, batch=batch, family="encoder")


def _encoder_decoder(name: str, prefix: str, config: dict[str, Any]) -> Model:
    make = FromTransformers(f"{prefix}ForConditionalGeneration", f"{prefix}Config", config)
    return Model(name=name, make=make, batch=translated, family="encoder-decoder")


ENCODERS = (
    _encoder("bert", "Bert", _BERT),
    _encoder(
        "distilbert",
        "DistilBert",
        {
            **_TOKENS,
            "dim": 64,
            "hidden_dim": 128,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
            "num_labels": 3,
        },
        "ForSequenceClassification",
        classified,
    ),
    _encoder("electra", "Electra", {**_BERT, "embedding_size": 32}, "ForPreTraining", replaced),
    _encoder("albert", "Albert", {**_BERT, "embedding_size": 32}),
    _encoder(
        "deberta_v2",
        "DebertaV2",
        {
            **_BERT,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
        },
    ),
    _encoder(
        "modernbert",
        "ModernBert",
        {
            **_BERT,
            "intermediate_size": 96,
            "global_attn_every_n_layers": 2,
            "local_attention": 8,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    _encoder("mpnet", "MPNet", {**_BERT, "pad_token_id": 1, "bos_token_id": 0}),
)

ENCODER_DECODERS = (
    _encoder_decoder(
        "t5",
        "T5",
        {
            **_TOKENS,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
    ),
    _encoder_decoder("bart", "Bart", _BART),
    _encoder_decoder("m2m_100", "M2M100", _BART),
)
