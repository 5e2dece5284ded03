"""Home-made models around attention: nanoGPT, complex rotations, learned biases, `torch.nn`'s own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 32
HEADS = 2
LONGEST = 32


def _heads(x: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    """[rows, length, width] as [rows, heads, length, head width]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class BiasedAttention(nn.Module):
    """Self-attention with a learned bias for each head and distance; the bias wants its gradient."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.written_out = written_out
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, 2 * LONGEST - 1))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (_heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        places = torch.arange(x.shape[1], device=x.device)
        bias = self.bias[:, places[:, None] - places + LONGEST - 1][None]
        if self.written_out:
            weights = ((q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5 + bias).softmax(-1)
            attended = weights @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(attended.transpose(1, 2).flatten(-2))


class LearnedBias(nn.Module):
    """The same attention twice: by torch's function, and written out."""

    def __init__(self) -> None:
        super().__init__()
        self.called = BiasedAttention(written_out=False)
        self.written = BiasedAttention(written_out=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.written(x + self.called(x))


class _GPTNorm(nn.Module):
    """nanoGPT's LayerNorm, which may lack a bias."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class _GPTAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.dropout = heads, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (_heads(part, self.n_head) for part in self.c_attn(x).split(x.shape[-1], dim=2))
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(x.shape)))


class _GPTMLP(nn.Module):
    def __init__(self, width: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class _GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.ln_1 = _GPTNorm(width, bias)
        self.attn = _GPTAttention(width, heads, dropout, bias)
        self.ln_2 = _GPTNorm(width, bias)
        self.mlp = _GPTMLP(width, dropout, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """After nanoGPT's model.py, with its names: tied head, logits and loss, targets of -1 ignored."""

    def __init__(self, vocabulary: int = 128, layers: int = 2, bias: bool = False) -> None:
        super().__init__()
        width, heads, dropout = 64, 4, 0.1
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(LONGEST, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(_GPTBlock(width, heads, dropout, bias) for _ in range(layers)),
                "ln_f": _GPTNorm(width, bias),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        positions = torch.arange(idx.shape[1], dtype=torch.long, device=idx.device)
        parts = self.transformer
        x = parts["drop"](parts["wte"](idx) + parts["wpe"](positions))
        for block in parts["h"]:
            x = block(x)
        x = parts["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


class ComplexRotary(nn.Module):
    """Causal attention of grouped heads, rotated by complex numbers as in the first LLaMA code."""

    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(64, 64, bias=False)
        self.wk = nn.Linear(64, 32, bias=False)
        self.wv = nn.Linear(64, 32, bias=False)
        self.wo = nn.Linear(64, 64, bias=False)
        angles = torch.outer(torch.arange(LONGEST).float(), 10000.0 ** (-torch.arange(0, 16, 2) / 16))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = pairs * self.turns[: x.shape[1], None, :]
        return torch.view_as_real(turned).flatten(3).type_as(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self._rotated(self.wq(x).unflatten(-1, (4, 16)))
        k = self._rotated(self.wk(x).unflatten(-1, (2, 16)))
        v = self.wv(x).unflatten(-1, (2, 16))
        k, v = (part.repeat_interleave(2, dim=2).transpose(1, 2) for part in (k, v))
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.wo(attended.transpose(1, 2).flatten(-2))


class ComplexLlama(nn.Module):
    """One layer before the complex rotation became a rotation of halves."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 64, bias=False)
        self.attention_norm = nn.RMSNorm(64, eps=1e-5)
        self.attention = ComplexRotary()
        self.ffn_norm = nn.RMSNorm(64, eps=1e-5)
        self.w1, self.w3 = (nn.Linear(64, 96, bias=False) for _ in range(2))
        self.w2 = nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.widen(x)
        h = h + self.attention(self.attention_norm(h))
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with a padding mask."""

    def __init__(self, norm_first: bool, activation: str | Callable) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 64, 0.1, activation, batch_first=True, norm_first=norm_first
        )
        norm = nn.LayerNorm(WIDTH) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.encoder(x, src_key_padding_mask=padding)
        return result


class Decoder(nn.Module):
    """`nn.TransformerDecoder`: causal over itself, across to a padded memory."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, 0.1, "gelu", batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        result: torch.Tensor = self.decoder(
            x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding
        )
        return result


class MultiheadAttentions(nn.Module):
    """`nn.MultiheadAttention` whose weights nobody wants, then one whose weights are used."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.telling = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = x + self.silent(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        attended, weights = self.telling(x, x, x, key_padding_mask=padding)
        return attended + weights @ x
