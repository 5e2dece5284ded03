"""Fused operations, one file an op.

Functions are bound here once and eagerly: `fuseline.ops.softmax` is the function, whatever was imported
before.
"""

from fuseline.ops.add_norm import add_layer_norm, add_rms_norm
from fuseline.ops.attention import backends as attention_backends
from fuseline.ops.attention.attention import attention
from fuseline.ops.attention.packed import attention_packed
from fuseline.ops.cross_entropy import cross_entropy
from fuseline.ops.decode_attention import LayerCache, decode_attention
from fuseline.ops.dropout import dropout
from fuseline.ops.dropout_add_norm import dropout_add_layer_norm, dropout_add_rms_norm
from fuseline.ops.embedding import embedding
from fuseline.ops.geglu import geglu
from fuseline.ops.gelu import gelu
from fuseline.ops.layer_norm import layer_norm
from fuseline.ops.linear import linear
from fuseline.ops.linear_cross_entropy import linear_cross_entropy
from fuseline.ops.mlp import mlp
from fuseline.ops.op import Case, Op, get, registered
from fuseline.ops.plans import explain
from fuseline.ops.quant_linear import quant_linear
from fuseline.ops.rms_norm import rms_norm
from fuseline.ops.rope import rope
from fuseline.ops.self_attention_layer import self_attention_layer
from fuseline.ops.softmax import softmax
from fuseline.ops.swiglu import swiglu

__all__ = [
    "Case",
    "LayerCache",
    "Op",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_backends",
    "attention_packed",
    "cross_entropy",
    "decode_attention",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "embedding",
    "explain",
    "geglu",
    "gelu",
    "get",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "mlp",
    "quant_linear",
    "registered",
    "rms_norm",
    "rope",
    "self_attention_layer",
    "softmax",
    "swiglu",
]
