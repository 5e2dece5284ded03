"""Models of images, of images with text, and of sound."""

from __future__ import annotations

from typing import Any

from .architecture import FromTransformers, Model
from .batches import VOCABULARY, captioned, pixels, sounds, spectrograms

_TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}

_VIT: dict[str, Any] = {**_TOWER, "image_size": 32, "patch_size": 8, "num_labels": 3}

_TEXT_AND_VISION: dict[str, Any] = {
    "text_config": {
        **_TOWER,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "projection_size": 64,
    },
    "vision_config": {**_TOWER, "image_size": 32, "patch_size": 8},
}

_WAVES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
    "apply_spec_augment": False,  # draws its masks from numpy's generator
}


def _images(name: str, prefix: str, config: dict[str, Any], sizes: tuple[int, int] = (32, 32)) -> Model:
    make = FromTransformers(f"{prefix}ForImageClassification", f"{prefix}Config", config)
    return Model(name=name, make=make, batch=pixels, family="vision", lengths=sizes)


def _waves(name: str, prefix: str, config: dict[str, Any]) -> Model:
    make = FromTransformers(f"{prefix}ForCTC", f"{prefix}Config", {**_WAVES, **config})
    return Model(name=name, make=make, batch=sounds, family="speech", lengths=(400, 520))


def _captions(name: str, prefix: str, config: dict[str, Any]) -> Model:
    make = FromTransformers(f"{prefix}Model", f"{prefix}Config", config)
    return Model(name=name, make=make, batch=captioned, family="vision")


VISION = (
    _images("vit", "ViT", _VIT),
    _images(
        "swin",
        "Swin",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 3,
        },
        (32, 48),
    ),
    _images(
        "convnext",
        "ConvNext",
        {"num_stages": 2, "hidden_sizes": [32, 64], "depths": [2, 2], "patch_size": 4, "num_labels": 3},
        (32, 48),
    ),
    _images("dinov2", "Dinov2", {**_VIT, "mlp_ratio": 2}, (32, 40)),
    _captions("clip", "CLIP", {**_TEXT_AND_VISION, "projection_dim": 32}),
    _captions("siglip", "Siglip", _TEXT_AND_VISION),
)

SPEECH = (
    _waves("wav2vec2", "Wav2Vec2", {}),
    _waves("hubert", "Hubert", {"feat_extract_norm": "layer", "do_stable_layer_norm": True}),
    Model(
        name="whisper",
        make=FromTransformers(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            {
                "vocab_size": VOCABULARY,
                "num_mel_bins": 16,
                "d_model": 64,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 128,
                "decoder_ffn_dim": 128,
                "max_source_positions": 24,
                "max_target_positions": 32,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "decoder_start_token_id": 3,
                "use_cache": False,
            },
        ),
        batch=spectrograms,
        family="speech",
    ),
)
