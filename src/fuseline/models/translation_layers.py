"""What both translation models are built of: attention, feed-forward, and the chain of branches between
norms.

A branch returns its last product without the bias: `Kernels.add_norm` adds bias, dropout and residual and
takes the next norm, all in one pass where they are fused. So a model is a chain: norm, branch, add and norm,
branch, add and norm, ... Pre-norm carries the sum on, post-norm the normed sum.

Shapes: B batch, T queries, S keys, C channels, H heads, D head_dim, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from fuseline.models.translation_config import TranslationConfig
from fuseline.models.translation_kernels import EPS, Kernels

KeysAndValues = tuple[Tensor, Tensor]
M = TypeVar("M", bound=nn.Module)


def listed(modules: Iterable[M]) -> Sequence[M]:
    """A `ModuleList` that a type checker knows the members of."""
    return cast(Sequence[M], nn.ModuleList(modules))


class Cache(Protocol):
    """Keeps the keys and values of one attention over earlier positions (see `fuseline.generation`)."""

    def append(self, k_BHTD: Tensor, v_BHTD: Tensor) -> KeysAndValues:
        """Take those of new positions, and return all so far: [B, H, S, D] each."""
        ...


class _Heads(nn.Module):
    """What self-attention and cross-attention share: heads, weighting, and the product at the end."""

    reads_weight_of = ("out",)

    def __init__(self, config: TranslationConfig, kernels: Kernels) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.dropout_p = config.dropout
        self.kernels = kernels
        self.out = nn.Linear(config.embed_dim, config.embed_dim)

    def split(self, x_BTC: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        return x_BTC.view(B, T, self.num_heads, self.head_dim).transpose(1, 2)

    def weighted(
        self, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, causal: bool, keep: Tensor | None
    ) -> Tensor:
        B, H, T, D = q_BHTD.shape
        p = self.dropout_p if self.training else 0.0
        y_BHTD = self.kernels.attention(q_BHTD, k_BHSD, v_BHSD, causal, keep, p)
        y_BTC = y_BHTD.transpose(1, 2).reshape(B, T, H * D)
        return F.linear(y_BTC, self.out.weight)


class SelfAttention(_Heads):
    """Each position gathers from the positions of its own sequence."""

    def __init__(self, config: TranslationConfig, kernels: Kernels, *, causal: bool) -> None:
        super().__init__(config, kernels)
        self.causal = causal
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim)

    def forward(self, x_BTC: Tensor, keep: Tensor | None, cache: Cache | None = None) -> Tensor:
        q_BTC, k_BTC, v_BTC = self.qkv(x_BTC).chunk(3, dim=-1)
        k_BHSD, v_BHSD = self.split(k_BTC), self.split(v_BTC)
        if cache is not None:
            k_BHSD, v_BHSD = cache.append(k_BHSD, v_BHSD)
        return self.weighted(self.split(q_BTC), k_BHSD, v_BHSD, causal=self.causal, keep=keep)


class CrossAttention(_Heads):
    """Each position gathers from what the encoder made of the source."""

    def __init__(self, config: TranslationConfig, kernels: Kernels) -> None:
        super().__init__(config, kernels)
        self.q = nn.Linear(config.embed_dim, config.embed_dim)
        self.kv = nn.Linear(config.embed_dim, 2 * config.embed_dim)

    def keys_and_values(self, memory_BSC: Tensor) -> KeysAndValues:
        """[B, H, S, D] each. They are the same for every position of the target."""
        k_BSC, v_BSC = self.kv(memory_BSC).chunk(2, dim=-1)
        return self.split(k_BSC), self.split(v_BSC)

    def forward(self, x_BTC: Tensor, source: KeysAndValues, keep: Tensor | None) -> Tensor:
        return self.weighted(self.split(self.q(x_BTC)), *source, causal=False, keep=keep)


class FeedForward(nn.Module):
    """Two products with a GELU between. `out.bias` is left to the caller."""

    reads_weight_of = ("inner", "out")

    def __init__(self, config: TranslationConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.inner = nn.Linear(config.embed_dim, config.ffn_dim)
        self.out = nn.Linear(config.ffn_dim, config.embed_dim)

    def forward(self, x_BTC: Tensor) -> Tensor:
        inner_BTF = F.linear(x_BTC, self.inner.weight)
        return F.linear(self.kernels.activation(inner_BTF, self.inner.bias), self.out.weight)


class Norm(nn.LayerNorm):
    """The weights of a LayerNorm; `Kernels` computes it."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__(config.embed_dim, eps=EPS)


class Chain(nn.Module):
    """Norms between branches. With pre-norm there is one more: before the first branch.

    `begin(x)` gives what the first branch reads and the stream; `add(i, x, bias, stream)` takes what branch i
    returned, and gives what the next one reads (after the last: the chain's result) and the stream.
    """

    def __init__(self, config: TranslationConfig, kernels: Kernels, branches: int) -> None:
        super().__init__()
        self.norm_first, self.dropout_p = config.norm_first, config.dropout
        self.kernels = kernels
        self.first = Norm(config) if config.norm_first else None
        self.norms = listed(Norm(config) for _ in range(branches))

    def begin(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        if self.first is None:
            return x_BTC, x_BTC
        return self.kernels.norm(x_BTC, self.first.weight, self.first.bias), x_BTC

    def add(self, index: int, x_BTC: Tensor, x_bias: Tensor, stream_BTC: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.norms[index]
        p = self.dropout_p if self.training else 0.0
        if not self.norm_first:  # what is normed is the stream, and keeps its precision under autocast
            x_BTC = x_BTC.to(stream_BTC.dtype)
        normed_BTC, sum_BTC = self.kernels.add_norm(x_BTC, x_bias, stream_BTC, norm.weight, norm.bias, p)
        return normed_BTC, sum_BTC if self.norm_first else normed_BTC


def key_mask(tokens_BS: Tensor, pad_id: int) -> Tensor:
    """[B, 1, 1, S], True where there is a token to see."""
    return (tokens_BS != pad_id)[:, None, None, :]


def init_weights(modules: Sequence[nn.Module], embed_dim: int) -> None:
    """Products by Xavier's uniform draw with biases at zero, token and position vectors with deviation
    C**-0.5."""
    for module in modules:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=embed_dim**-0.5)
