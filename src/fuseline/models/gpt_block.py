"""GPT-2's blocks (`gpt.py`), and what a branch leaves to the next norm.

A block is two branches, attention and MLP. Each reads a normalized copy of the stream and computes something
to add to it. With the config's fused norm one pass adds the result of a branch, with its last bias and its
dropout, and normalizes the sum for the next branch.

Shapes: B batch, T time, C channels (embed_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuseline.nn
from fuseline import ops
from fuseline.models.gpt_config import GPTConfig
from fuseline.models.heads import Attend, Heads
from fuseline.nn import branch
from fuseline.nn.feed_forward import autocast_to, feed_forward, is_plain
from fuseline.nn.folded_norm import Folded, can_fold, fold
from fuseline.nn.fp8_linear import Fp8Linear
from fuseline.ops.autocast import autocast_dtype
from fuseline.ops.layer_norm import layer_norm_and_input

__all__ = ["MLP", "Attention", "Block", "Found"]

FOLD_FROM = 16384  # tokens a call, with which a step of either preset took as long as without (H200)


def make_norm(config: GPTConfig) -> nn.Module:
    kind = fuseline.nn.LayerNorm if config.norm == "fuseline" else nn.LayerNorm
    return kind(config.embed_dim, eps=1e-5, bias=config.bias)


class Found(NamedTuple):
    """What a branch adds to the stream: dropout(y + bias), y [B, T, C] and bias [C].

    A fused norm that reads the sum next adds the bias and drops in the same pass, and its backward gives the
    bias its gradient.
    """

    y: Tensor
    bias: Tensor | None = None
    dropout_p: float = 0.0


def _narrow(x_BTC: Tensor) -> torch.dtype | None:
    """The dtype that branches multiply in, where that is not the stream's."""
    return autocast_dtype(x_BTC) if x_BTC.dtype is torch.float32 else None


def _affine(norm: nn.LayerNorm, affine: bool) -> tuple[Tensor | None, Tensor | None]:
    return (norm.weight, norm.bias) if affine else (None, None)


def _first_norm(norm: nn.Module, x_BTC: Tensor, affine: bool) -> tuple[Tensor, Tensor]:
    """The norm before the first branch, and the stream. If fused it leaves in the dtype that the branch
    multiplies in."""
    if not is_plain(norm, fuseline.nn.LayerNorm):
        return norm(x_BTC), x_BTC
    shape, (weight, bias), eps = norm.normalized_shape, _affine(norm, affine), norm.eps
    return layer_norm_and_input(x_BTC, shape, weight, bias, eps, out_dtype=_narrow(x_BTC))


def add_norm(
    norm: nn.Module, found: Found | None, x_BTC: Tensor, seed: Tensor | None, affine: bool = True
) -> tuple[Tensor, Tensor]:
    """What a branch found, added to the stream: the norm of the sum, and the sum. One pass if fused, in which
    the norm leaves in the dtype that the branch came in. `seed`, if it is given, fixes what is dropped. Not
    `affine`: without the norm's weight and bias."""
    if found is None:
        return _first_norm(norm, x_BTC, affine)
    if isinstance(norm, fuseline.nn.LayerNorm):
        shape, (weight, bias), eps = norm.normalized_shape, _affine(norm, affine), norm.eps
        if found.bias is None and found.dropout_p == 0.0:
            return ops.add_layer_norm(found.y, x_BTC, shape, weight, bias, eps)
        x_bias = found.bias if found.bias is None or weight is None else found.bias.to(weight.dtype)
        return ops.dropout_add_layer_norm(
            found.y, x_BTC, shape, weight, bias, eps, x_bias=x_bias, p=found.dropout_p, seed=seed
        )
    x_BTC = _added(found, x_BTC)
    return norm(x_BTC), x_BTC


def _added(found: Found, x_BTC: Tensor) -> Tensor:
    y_BTC = found.y if found.bias is None else found.y + found.bias
    return x_BTC + F.dropout(y_BTC, found.dropout_p)


def _add_norm_and_branch(
    norm: nn.Module, branch: nn.Module, found: Found | None, x_BTC: Tensor, seed: Tensor | None
) -> tuple[Tensor, Found]:
    """The stream with what the branch before found, and what `branch` finds in its norm."""
    if not (is_plain(branch, Attention) or is_plain(branch, MLP)) or is_replaced(branch):
        # One with hooks, a wrapper or a compiled call is called as a module.
        y_BTC, x_BTC = add_norm(norm, found, x_BTC, seed)
        return x_BTC, Found(branch(y_BTC))
    first, folded = branch.folds() if _is_worth_folding(x_BTC) else None, None
    if first is not None and is_plain(norm, fuseline.nn.LayerNorm) and can_fold(norm, first):
        folded = fold(norm, first)
    y_BTC, x_BTC = add_norm(norm, found, x_BTC, seed, affine=folded is None)
    return x_BTC, branch.found(y_BTC, folded)


def _is_worth_folding(x_BTC: Tensor) -> bool:
    """Whether the weight and bias of a norm go into the layer behind it: norm and layer then keep one tensor
    of 16 bits for their gradients, and not one of 32 bits beside it. Folding reads and writes weights."""
    return torch.is_grad_enabled() and _narrow(x_BTC) is not None and x_BTC.shape[:-1].numel() >= FOLD_FROM


def is_replaced(module: nn.Module) -> bool:
    """Whether a call of the module runs something else than its class's `forward`."""
    return "forward" in module.__dict__ or module._compiled_call_impl is not None


def _leaves_to_norm(projection: nn.Module, dropout: nn.Module) -> bool:
    """Whether a branch may leave its last bias and dropout to the next norm: nothing else listens to them."""
    linear = is_plain(projection, nn.Linear) or is_plain(projection, Fp8Linear)
    return linear and (is_plain(dropout, nn.Dropout) or is_plain(dropout, nn.Identity))


def _product(linear: nn.Linear, x: Tensor) -> Tensor:
    """x W^T, without the bias."""
    return linear.product(x) if isinstance(linear, Fp8Linear) else ops.linear(x, linear.weight)


def dropout_p(dropout: nn.Module) -> float:
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def make_dropout(config: GPTConfig) -> nn.Module:
    # nn.Dropout(0.0) still launches kernels while training; Identity launches none.
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


class Attention(nn.Module):
    """Causal self-attention: position t takes a weighted mean of the values of positions 0..t."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.fused = config.norm == "fuseline"
        self.backend = config.attention
        self.dropout_p = config.dropout
        self.c_attn = nn.Linear(config.embed_dim, 3 * config.embed_dim, bias=config.bias)
        self.c_proj = nn.Linear(config.embed_dim, config.embed_dim, bias=config.bias)
        self.resid_dropout = make_dropout(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(self._gathered(x_BTC)))

    def found(self, x_BTC: Tensor, folded: Folded | None = None) -> Found:
        """`folded`: c_attn with what x's norm left out, if `folds` named it."""
        if self.fused and _leaves_to_norm(self.c_proj, self.resid_dropout):
            y_BTC = _product(self.c_proj, self._gathered(x_BTC, folded))
            return Found(y_BTC, self.c_proj.bias, dropout_p(self.resid_dropout))
        return Found(self(x_BTC))

    def folds(self) -> nn.Linear | None:
        """The layer that can take the weight and bias of the norm ahead, if there is one."""
        plain = is_plain(self.c_attn, nn.Linear) and _leaves_to_norm(self.c_proj, self.resid_dropout)
        return self.c_attn if self.fused and self.training and plain else None

    def _gathered(self, x_BTC: Tensor, folded: Folded | None = None) -> Tensor:
        plain = self.fused and is_plain(self.c_attn, nn.Linear)
        weight, bias = folded or (self.c_attn.weight, self.c_attn.bias)
        return ops.attention_packed(
            ops.linear(x_BTC, weight, bias) if plain else self.c_attn(x_BTC),
            self.num_heads,
            causal=True,
            dropout_p=self.dropout_p if self.training else 0.0,
            backend=self.backend,
        )


class MLP(nn.Module):
    """Two linear layers with a GELU between, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.embed_dim, 4 * config.embed_dim, bias=config.bias)
        self.gelu = nn.GELU(approximate="tanh" if config.activation == "gelu_tanh" else "none")
        self.fused = config.norm == "fuseline"
        self.c_proj = nn.Linear(4 * config.embed_dim, config.embed_dim, bias=config.bias)
        self.dropout = make_dropout(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self._is_one_op():
            return self.dropout(feed_forward(x_BTC, self.c_fc, self.c_proj, self.gelu.approximate))
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x_BTC))))

    def found(self, x_BTC: Tensor, folded: Folded | None = None) -> Found:
        """`folded`: c_fc with what x's norm left out, if `folds` named it."""
        if not (self.fused and _leaves_to_norm(self.c_proj, self.dropout)):
            return Found(self(x_BTC))
        if folded is not None:
            y_BTC = ops.mlp(*autocast_to(x_BTC, *folded, self.c_proj.weight, None), self.gelu.approximate)
        elif self._is_one_op():
            y_BTC = feed_forward(x_BTC, self.c_fc, self.c_proj, self.gelu.approximate, with_second_bias=False)
        else:
            y_BTC = _product(self.c_proj, self.gelu(self.c_fc(x_BTC)))
        return Found(y_BTC, self.c_proj.bias, dropout_p(self.dropout))

    def folds(self) -> nn.Linear | None:
        """The layer that can take the weight and bias of the norm ahead, if there is one."""
        plain = is_plain(self.c_fc, nn.Linear) and _leaves_to_norm(self.c_proj, self.dropout)
        return self.c_fc if plain and self._is_one_op() else None

    def together(self) -> tuple[nn.Linear, ...]:
        """The layers that are one op in training."""
        return (self.c_fc, self.c_proj) if self._is_one_op() else ()

    def _is_one_op(self) -> bool:
        """In training both layers are one op if fused: GELU and its gradient stand at products' ends."""
        linear = any(
            is_plain(self.c_fc, kind) and is_plain(self.c_proj, kind) for kind in (nn.Linear, Fp8Linear)
        )
        return self.fused and self.training and linear and is_plain(self.gelu, nn.GELU)


class Block(nn.Module):
    """One layer: attention, then the MLP, each reading a normed copy of the stream and adding to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self, x_BTC: Tensor, found: Found | None = None, seeds: Sequence[Tensor | None] = (None, None)
    ) -> tuple[Tensor, Found | None]:
        """The stream, and what the MLP found, which the next norm adds to it; `found` is that of the layer
        before. `seeds` fix what each of the two norms drops; they draw their own where they are None.

        A block that is wrapped or listened to adds it itself: FSDP frees its parameters when it is done."""
        x_BTC, found = _add_norm_and_branch(self.ln_1, self.attn, found, x_BTC, seeds[0])
        x_BTC, found = _add_norm_and_branch(self.ln_2, self.mlp, found, x_BTC, seeds[1])
        return (x_BTC, found) if is_plain(self, Block) else (_added(found, x_BTC), None)

    def continued(self, x_BTC: Tensor, layer: int, attend: Attend, config: GPTConfig) -> Tensor:
        """The same without dropout, `attend` gathering from positions that need not be here."""
        attn, mlp, fused = self.attn, self.mlp, config.norm == "fuseline"
        heads = Heads(config.num_heads, config.num_heads, config.head_dim, fused=fused)
        y_BTC = attend(layer, branch(attn.c_attn, x_BTC, norm=self.ln_1, fused=fused), heads)
        x_BTC = branch(attn.c_proj, y_BTC, residual=x_BTC, fused=fused)
        inner = branch(mlp.c_fc, x_BTC, norm=self.ln_2, activation=config.activation, fused=fused)
        return branch(mlp.c_proj, inner, residual=x_BTC, fused=fused)
