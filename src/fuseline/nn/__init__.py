"""Drop-in modules over the ops."""

from fuseline.nn.activations import GELU, GeGLU, SwiGLU
from fuseline.nn.embedding import Embedding
from fuseline.nn.layer_norm import LayerNorm
from fuseline.nn.rotary import RotaryEmbedding

__all__ = ["GELU", "Embedding", "GeGLU", "LayerNorm", "RotaryEmbedding", "SwiGLU"]
