"""The C records of the small attention layer and of a whole decoding step (fuseline_small_layer.h and
fuseline_decode_step.h in csrc/kernels), through ctypes."""

from __future__ import annotations

import ctypes

_POINTER, _INT, _SIZE, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
STEP_LAYERS = 64


class LayerRecord(ctypes.Structure):
    """`fuseline_small_layer`."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "qkv_weight", "qkv_bias", "out_weight", "out_bias", "mask")),
        ("mask_strides", _SIZE * 4),
        ("mask_hides", _INT),
        *((name, _POINTER) for name in ("seed", "qkv", "attended", "out")),
        *((name, _SIZE) for name in ("batch", "seqlen", "embed_dim", "num_heads", "num_kv_heads")),
        *((name, _SIZE) for name in ("head_dim", "out_dim")),
        *((name, _INT) for name in ("causal", "shared_projection")),
        *((name, _DOUBLE) for name in ("softmax_scale", "dropout")),
        *((name, _INT) for name in ("dtype", "tf32")),
    ]


class LayerGradientsRecord(ctypes.Structure):
    """`fuseline_small_layer_gradients`."""

    _fields_ = [
        *((name, _POINTER) for name in ("grad_out", "grad_qkv", "grad_kv", "grad_x", "grad_qkv_weight")),
        *((name, _POINTER) for name in ("grad_qkv_bias", "grad_out_weight", "grad_out_bias")),
    ]


class StepLayerRecord(ctypes.Structure):
    """`fuseline_step_layer`."""

    _fields_ = [
        *((f"{name}_{what}", _POINTER) for name in ("norm", "qkv", "out") for what in ("weight", "bias")),
        *((f"{name}_{what}", _POINTER) for name in ("mlp_norm", "up", "down") for what in ("weight", "bias")),
        *((name, _POINTER) for name in ("k", "v")),
    ]


class StepRecord(ctypes.Structure):
    """`fuseline_step`."""

    _fields_ = [
        ("layers", StepLayerRecord * STEP_LAYERS),
        *((name, _POINTER) for name in ("token_table", "position_table", "cos", "sin")),
        *((name, _POINTER) for name in ("norm_weight", "norm_bias", "head_weight", "length", "token")),
        *((name, _POINTER) for name in ("logits", "workspace")),
        *((name, _SIZE) for name in ("num_layers", "embed_dim", "heads", "kv_heads", "head_dim")),
        *((name, _SIZE) for name in ("ffn_dim", "vocab_size", "head_stride", "window")),
        *((name, _DOUBLE) for name in ("eps", "scale")),
        *((name, _INT) for name in ("dtype", "norm", "activation")),
    ]
