"""`torch.nn.TransformerEncoderLayer` in few launches: a whole transformer block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from fuseline.nn.feed_forward import feed_forward, is_plain
from fuseline.nn.multihead_attention import MultiheadAttention
from fuseline.ops import dropout_add_layer_norm, gelu, layer_norm


class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer`: same arguments, parameters, state_dict and results.

    The attention is one op (the docstring of `fuseline.nn.MultiheadAttention` says for which masks). Dropout,
    residual and norm between the two halves are one pass, and so are the first linear layer's bias and GELU.
    The forward of a small layer with `norm_first` and GELU and without dropout takes seven or eight launches.

    Two things differ from torch: a query whose keys are all hidden attends to nothing, and dropout draws
    other random numbers. Nested tensors run torch's own forward.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[torch.Tensor], torch.Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device=device,
            dtype=dtype,
        )
        # The modules that torch made, with their values: nothing is drawn twice.
        ours = MultiheadAttention(
            d_model, nhead, dropout=dropout, bias=bias, batch_first=batch_first, device="meta", dtype=dtype
        )
        ours.load_state_dict(self.self_attn.state_dict(), assign=True)
        self.self_attn = ours

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """As in torch. src: [B, S, E] (`batch_first`), [S, B, E] or [S, E]; True in a mask hides."""
        if src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        masks = src_mask, src_key_padding_mask, is_causal
        if self.norm_first:
            normed = layer_norm(src, *_affine(self.norm1))
            normed, total = self._joined(self._attended(normed, *masks), src, self.dropout1, self.norm2)
            return total + self.dropout2(self._feed_forward(normed))
        x, _ = self._joined(self._attended(src, *masks), src, self.dropout1, self.norm1)
        return self._joined(self._feed_forward(x), x, self.dropout2, self.norm2)[0]

    def _attended(
        self, x: torch.Tensor, mask: torch.Tensor | None, padding: torch.Tensor | None, is_causal: bool
    ) -> torch.Tensor:
        given = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": is_causal}
        return self.self_attn(x, x, x, need_weights=False, **given)[0]

    def _joined(
        self, x: torch.Tensor, residual: torch.Tensor, dropout: torch.nn.Dropout, norm: torch.nn.LayerNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of residual + dropout(x), and that sum."""
        if not self.norm_first:  # the sum is the next residual, so it keeps its precision under autocast
            x = x.to(residual.dtype)
        p = _drops(dropout)
        if p is None:
            x, p = dropout(x), 0.0
        return dropout_add_layer_norm(x, residual, *_affine(norm), p=p)

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        is_gelu = self.activation is F.gelu or is_plain(self.activation, torch.nn.GELU)
        approximate = getattr(self.activation, "approximate", "none")
        fused = is_gelu and is_plain(self.linear1, torch.nn.Linear)
        if fused and _drops(self.dropout) == 0 and is_plain(self.linear2, torch.nn.Linear):
            return feed_forward(x, self.linear1, self.linear2, approximate)
        if fused:
            hidden = gelu(F.linear(x, self.linear1.weight), self.linear1.bias, approximate)
        else:
            hidden = self.activation(self.linear1(x))
        return self.linear2(self.dropout(hidden))


def _drops(dropout: torch.nn.Module) -> float | None:
    """The dropout probability; None if `module` is not a plain dropout."""
    if not is_plain(dropout, torch.nn.Dropout):
        return None
    return dropout.p if dropout.training else 0.0


def _affine(
    norm: torch.nn.LayerNorm,
) -> tuple[tuple[int, ...], torch.Tensor | None, torch.Tensor | None, float]:
    return norm.normalized_shape, norm.weight, norm.bias, norm.eps
