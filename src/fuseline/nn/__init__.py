"""Drop-in modules over the ops."""

from fuseline.nn.activations import GELU, GeGLU, SwiGLU
from fuseline.nn.branch import branch
from fuseline.nn.embedding import Embedding
from fuseline.nn.layer_norm import LayerNorm
from fuseline.nn.losses import CrossEntropyLoss, LinearCrossEntropyLoss
from fuseline.nn.multihead_attention import MultiheadAttention
from fuseline.nn.norms import DropoutAddLayerNorm, DropoutAddRMSNorm, RMSNorm
from fuseline.nn.quant_linear import QuantLinear
from fuseline.nn.rotary import RotaryEmbedding
from fuseline.nn.self_attention import SelfAttention
from fuseline.nn.transformer_layer import TransformerEncoderLayer

__all__ = [
    "GELU",
    "CrossEntropyLoss",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "Embedding",
    "GeGLU",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "MultiheadAttention",
    "QuantLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "SelfAttention",
    "SwiGLU",
    "TransformerEncoderLayer",
    "branch",
]
