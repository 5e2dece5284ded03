"""Drop-in modules over the ops."""

from fuseline.nn.activations import GELU, GeGLU, SwiGLU
from fuseline.nn.branch import branch
from fuseline.nn.embedding import Embedding
from fuseline.nn.layer_norm import LayerNorm
from fuseline.nn.losses import CrossEntropyLoss, LinearCrossEntropyLoss
from fuseline.nn.norms import DropoutAddLayerNorm, DropoutAddRMSNorm, RMSNorm
from fuseline.nn.rotary import RotaryEmbedding

__all__ = [
    "GELU",
    "CrossEntropyLoss",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "Embedding",
    "GeGLU",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "branch",
]
