"""Home-made models with traps, as data: almost-norms, almost-GELUs, shared, tied, wrapped modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .architecture import Batch, Model
from .batches import causal, padding_mask, vectors, words
from .home_made_attention import ComplexLlama, Decoder, Encoder, LearnedBias, MultiheadAttentions, NanoGPT
from .home_made_mlps import (
    Checkpointed,
    DataDependent,
    DropoutBetween,
    InPlaceActivations,
    LoRA,
    Parametrized,
    RoughMLP,
    SharedTwice,
    TiedThrice,
    WrongGates,
)
from .home_made_norms import (
    Around,
    BufferScale,
    CustomAutograd,
    HookedModules,
    NormOverChannels,
    NormPerHead,
    OddEpsilon,
    PartialRMSNorm,
    ReadsTheTuple,
    UnbiasedLayerNorm,
)


def _padded(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """x and, as `torch.nn` wants it, True where it is padding."""
    batch = vectors(generator, rows, length, left)
    return {**batch, "padding": padding_mask(rows, length, left) == 0}


def _with_memory(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """x, and a padded memory of another length."""
    memory = _padded(generator, rows, length + 3, left)
    return {**vectors(generator, rows, length, left), "memory": memory["x"], "padding": memory["padding"]}


def _next_words(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """nanoGPT's arguments; some targets are left out."""
    targets = words(generator, rows, length).masked_fill(padding_mask(rows, length, left) == 0, -1)
    return {"idx": words(generator, rows, length), "targets": targets}


def _of_one_sign(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """Values of positive mean in the training batch, which has two rows, of negative mean in the other."""
    sign = 1.0 if rows == 2 else -1.0
    return {"x": vectors(generator, rows, length, left)["x"] + sign}


def _model(name: str, make: Any, batch: Any = vectors, **options: Any) -> Model:
    return Model(name=name, make=make, batch=batch, **options)


HOME_MADE = (
    _model("odd_epsilon", OddEpsilon),
    _model("unbiased_layer_norm", lambda: Around(UnbiasedLayerNorm())),
    _model("partial_rms_norm", lambda: Around(PartialRMSNorm())),
    _model("norm_returns_tuple", ReadsTheTuple),
    _model("norm_over_channels", NormOverChannels, lengths=(12, 32)),
    _model("norm_weight_per_head", NormPerHead),
    _model("custom_autograd", CustomAutograd),
    _model("buffer_scale", BufferScale),
    _model("hooks", HookedModules),
    _model("wrong_gates", WrongGates),
    _model("rough_gelu", lambda: Around(RoughMLP())),
    _model("in_place", lambda: Around(InPlaceActivations())),
    _model("dropout_between", lambda: Around(DropoutBetween())),
    _model("shared_twice", SharedTwice),
    _model("tied_thrice", TiedThrice, causal),
    _model("data_dependent", DataDependent, _of_one_sign),
    _model("lora", LoRA),
    _model("parametrized", Parametrized),
    _model("checkpointed", Checkpointed),
    _model("learned_bias", LearnedBias),
    _model("nanogpt", NanoGPT, _next_words),
    _model("complex_llama", ComplexLlama),
    _model("encoder_post_relu", partial(Encoder, False, "relu"), _padded),
    _model("encoder_post_gelu", partial(Encoder, False, "gelu"), _padded),
    _model("encoder_pre_relu", partial(Encoder, True, "relu"), _padded),
    _model("encoder_pre_gelu", partial(Encoder, True, "gelu"), _padded),
    _model("decoder", Decoder, _with_memory),
    _model("multihead_attention", MultiheadAttentions, _padded),
)
