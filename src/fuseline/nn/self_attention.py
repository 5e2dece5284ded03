"""Multi-head self-attention whose heads share one projection, in three implementations behind one interface.

Each head projects its own D = embed_dim / num_heads elements of a token to q, k and v, all heads with the
same [D, D] weights and no bias. Scores are divided by the square root of the embedding size, not of the
head's. The output projection has a bias:

    q_h, k_h, v_h = x_h W_q^T, x_h W_k^T, x_h W_v^T
    out = concat_h(softmax(q_h k_h^T / sqrt(embed_dim), masked) v_h) W_out^T + b_out

`python` is the formula in PyTorch's operators. `aten` is the same as one op in C++ with its gradient derived
by hand (docs/attention_backward.md). `fused` uses the kernels of `fuseline.ops.self_attention_layer` where
they support the layer, and `aten` elsewhere.

In eager mode `fused` is the fastest or within 5% of it in most cases, because it makes one call in place of
many; the exception is exact fp32 from 25 tokens of 1,024 elements on. Inside a CUDA graph on an H100, where
calls cost nothing, the forward alone is faster with `fused` up to 512 elements (up to 2.7 times; in exact
fp32 up to 30 tokens) and with `aten` at 1,024. Forward and backward together are faster with `aten` in exact
fp32 (1.1 to 6.7 times), in 16 bits from 64 tokens on (1.1 to 2.4 times), and at 1,024 elements.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from fuseline.errors import InputError, unknown_name
from fuseline.ops import self_attention_layer

IMPLEMENTATIONS = ("python", "aten", "fused")


class SelfAttention(nn.Module):
    """Self-attention of x [B, S, embed_dim] with projections shared by the heads.

    Parameters: `qkv_weight` [3 D, D] (rows of q, of k, of v), `out_weight` [embed_dim, embed_dim], `out_bias`
    [embed_dim]. `implementation` is `python`, `aten` or `fused`, and may be changed between calls.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        implementation: str = "fused",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise InputError(
                f"SelfAttention: embed_dim={embed_dim} is not a multiple of num_heads={num_heads}."
            )
        if implementation not in IMPLEMENTATIONS:
            raise unknown_name("implementation", implementation, IMPLEMENTATIONS)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.implementation = implementation
        self.qkv_weight = nn.Parameter(
            torch.empty(3 * self.head_dim, self.head_dim, device=device, dtype=dtype)
        )
        self.out_weight = nn.Parameter(torch.empty(embed_dim, embed_dim, device=device, dtype=dtype))
        self.out_bias = nn.Parameter(torch.empty(embed_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each projection from Xavier's uniform distribution; set the bias to zero."""
        for weight in (*self.qkv_weight.chunk(3), self.out_weight):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.out_bias)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, implementation={self.implementation!r}"

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """x [B, S, embed_dim]; mask [S, S], [B, S, S] or [B, 1 or H, S, S], where False or 0 hides a key.

        A query whose keys are all hidden attends to nothing: its result is the output projection's bias.
        """
        if mask is not None and mask.dtype != torch.bool:
            mask = mask != 0
        if self.implementation == "python":
            return self._in_python(x, mask)
        return self_attention_layer(
            x,
            self.qkv_weight,
            None,
            self.out_weight,
            self.out_bias,
            num_heads=self.num_heads,
            mask=mask,
            softmax_scale=1.0 / math.sqrt(self.embed_dim),
            implementation=self.implementation,
        )

    def _in_python(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        B, S, E = x.shape
        heads = x.reshape(B, S, self.num_heads, self.head_dim)
        q, k, v = F.linear(heads, self.qkv_weight).transpose(1, 2).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.embed_dim)
        if mask is not None:
            mask = mask.unsqueeze(1) if mask.dim() == 3 else mask
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        attended = (weights @ v).transpose(1, 2).reshape(B, S, E)
        return F.linear(attended, self.out_weight, self.out_bias)
