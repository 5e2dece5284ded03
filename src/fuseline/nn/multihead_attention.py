"""`torch.nn.MultiheadAttention` over Fuseline's self-attention layer."""

from __future__ import annotations

import warnings

import torch

from fuseline.ops import self_attention_layer


class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`: same arguments, parameters, state_dict and results.

    Self-attention (`query is key is value`) with `need_weights=False` runs as one op
    (`fuseline.ops.self_attention_layer`), small layers on a GPU in one launch. This needs boolean masks or
    none, one embedding size for queries, keys and values, and neither `add_bias_kv` nor `add_zero_attn`.
    Every other call runs torch's own forward.

    One difference: a query whose keys are all hidden attends to nothing, where torch gives NaN.

    In a `torch.nn.TransformerEncoderLayer` in evaluation torch's fast path takes this module's weights to a
    kernel of its own and never calls it; a `UserWarning` says so.
    """

    _in_forward = False

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As torch's. query, key, value: [B, S, E] (`batch_first`), [S, B, E], [S, E]; masks: True hides."""
        if need_weights or not self._is_one_op(query, key, value, key_padding_mask, attn_mask, is_causal):
            self._in_forward = True
            try:
                return super().forward(
                    query,
                    key,
                    value,
                    key_padding_mask=key_padding_mask,
                    need_weights=need_weights,
                    attn_mask=attn_mask,
                    average_attn_weights=average_attn_weights,
                    is_causal=is_causal,
                )
            finally:
                self._in_forward = False
        x = query
        if query.dim() == 2:
            x = query.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            x = query.transpose(0, 1)
        causal = is_causal and key_padding_mask is None  # torch treats is_causal as a promise about attn_mask
        mask = None
        if attn_mask is not None and not causal:
            mask = ~attn_mask
            if mask.dim() == 3:
                mask = mask.view(x.shape[0], self.num_heads, *mask.shape[1:])
        out = self_attention_layer(
            x,
            self.in_proj_weight,
            self.in_proj_bias,
            self.out_proj.weight,
            self.out_proj.bias,
            num_heads=self.num_heads,
            causal=causal,
            mask=mask,
            key_padding=key_padding_mask,
            dropout_p=self.dropout if self.training else 0.0,
        )
        if query.dim() == 2:
            return out.squeeze(0), None
        return (out if self.batch_first else out.transpose(0, 1)), None

    def merge_masks(
        self,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
        query: torch.Tensor,
    ) -> tuple[torch.Tensor | None, int | None]:
        """As torch's. Outside of `forward` only the encoder's fast path calls it."""
        if not self._in_forward and not torch.compiler.is_compiling():
            warnings.warn(
                "torch's fast path for encoders computes this layer itself and does not call "
                "fuseline.nn.MultiheadAttention. To use it: torch.backends.mha.set_fastpath_enabled(False).",
                stacklevel=2,
            )
        return super().merge_masks(attn_mask, key_padding_mask, query)

    def _is_one_op(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
    ) -> bool:
        """Whether this call is plain self-attention. Calls that torch refuses go to torch, which raises."""
        if query is not key or key is not value or query.is_nested or query.dim() not in (2, 3):
            return False
        if self.in_proj_weight is None or self.bias_k is not None or self.add_zero_attn:
            return False
        if query.shape[-1] != self.embed_dim or (is_causal and attn_mask is None):
            return False
        B, S = (1, query.shape[0]) if query.dim() == 2 else query.shape[:2]
        if query.dim() == 3 and not self.batch_first:
            B, S = S, B
        rows = (S,) if query.dim() == 2 else (B, S)
        if key_padding_mask is not None and (
            key_padding_mask.dtype != torch.bool or key_padding_mask.shape != rows
        ):
            return False
        return attn_mask is None or (
            attn_mask.dtype == torch.bool and attn_mask.shape in ((S, S), (B * self.num_heads, S, S))
        )
