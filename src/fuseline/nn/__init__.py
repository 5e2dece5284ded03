"""Drop-in modules over the ops."""

from fuseline.nn.layer_norm import LayerNorm

__all__ = ["LayerNorm"]
