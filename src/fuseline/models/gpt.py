"""GPT-2, whole: read it from top to bottom and you know the model.

A GPT guesses the next token from those before it. Each token becomes a vector of C numbers, to which a vector
for its position is added. L blocks then each do two things, and add what they find to the running vectors
(the residual stream): *attention*, where each position gathers from earlier ones, and an *MLP*, where each
position thinks alone. A last norm, and a product with the token vectors themselves (the head is tied to the
embedding), give a score for each word of the vocabulary: the logits.

This is the architecture of GPT-2 (Radford et al., 2019) as nanoGPT writes it: norm before each branch, exact
GELU, learned positions. Parameters carry nanoGPT's names, so checkpoints go both ways. What differs is what
does not show in the numbers: attention and norm go through Fuseline's ops, so that a config says which kernel
runs; and the vocabulary may be padded (see `GPT._logits`).

Shapes: B batch, T time, C channels (embed_dim), H heads, D head_dim (C / H), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuseline.nn
from fuseline import ops
from fuseline.errors import InputError, unknown_name
from fuseline.models.gpt_config import PRESETS, GPTConfig, preset
from fuseline.models.heads import Attend, Heads
from fuseline.nn import branch
from fuseline.nn.feed_forward import autocast_to, feed_forward, is_plain
from fuseline.nn.folded_norm import Folded, can_fold, fold
from fuseline.nn.fp8_linear import Fp8Linear
from fuseline.ops.embedding import embedding_and_table
from fuseline.ops.layer_norm import layer_norm_and_input
from fuseline.ops.philox import draw_seed

__all__ = ["GPT", "MLP", "PRESETS", "Attention", "Block", "GPTConfig", "Transformer", "preset"]

IGNORE_INDEX = -1
FOLD_FROM = 16384  # tokens a call, with which a step of either preset took as long as without (H200)


def _norm(config: GPTConfig) -> nn.Module:
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
    device = x_BTC.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast and x_BTC.dtype is torch.float32 else None


def _affine(norm: nn.LayerNorm, affine: bool) -> tuple[Tensor | None, Tensor | None]:
    return (norm.weight, norm.bias) if affine else (None, None)


def _first_norm(norm: nn.Module, x_BTC: Tensor, affine: bool) -> tuple[Tensor, Tensor]:
    """The norm before the first branch, and the stream. If fused it leaves in the dtype that the branch
    multiplies in."""
    if not is_plain(norm, fuseline.nn.LayerNorm):
        return norm(x_BTC), x_BTC
    shape, (weight, bias), eps = norm.normalized_shape, _affine(norm, affine), norm.eps
    return layer_norm_and_input(x_BTC, shape, weight, bias, eps, out_dtype=_narrow(x_BTC))


def _add_norm(
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
    if not (is_plain(branch, Attention) or is_plain(branch, MLP)) or _is_replaced(branch):
        # One with hooks, a wrapper or a compiled call is called as a module.
        y_BTC, x_BTC = _add_norm(norm, found, x_BTC, seed)
        return x_BTC, Found(branch(y_BTC))
    first, folded = branch.folds() if _is_worth_folding(x_BTC) else None, None
    if first is not None and is_plain(norm, fuseline.nn.LayerNorm) and can_fold(norm, first):
        folded = fold(norm, first)
    y_BTC, x_BTC = _add_norm(norm, found, x_BTC, seed, affine=folded is None)
    return x_BTC, branch.found(y_BTC, folded)


def _is_worth_folding(x_BTC: Tensor) -> bool:
    """Whether the weight and bias of a norm go into the layer behind it: norm and layer then keep one tensor
    of 16 bits for their gradients, and not one of 32 bits beside it. Folding reads and writes weights."""
    return torch.is_grad_enabled() and _narrow(x_BTC) is not None and x_BTC.shape[:-1].numel() >= FOLD_FROM


def _is_replaced(module: nn.Module) -> bool:
    """Whether a call of the module runs something else than its class's `forward`."""
    return "forward" in module.__dict__ or module._compiled_call_impl is not None


def _leaves_to_norm(projection: nn.Module, dropout: nn.Module) -> bool:
    """Whether a branch may leave its last bias and dropout to the next norm: nothing else listens to them."""
    linear = is_plain(projection, nn.Linear) or is_plain(projection, Fp8Linear)
    return linear and (is_plain(dropout, nn.Dropout) or is_plain(dropout, nn.Identity))


def _product(linear: nn.Linear, x: Tensor) -> Tensor:
    """x W^T, without the bias."""
    return linear.product(x) if isinstance(linear, Fp8Linear) else ops.linear(x, linear.weight)


def _dropout_p(dropout: nn.Module) -> float:
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def _dropout(config: GPTConfig) -> nn.Module:
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
        self.resid_dropout = _dropout(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(self._gathered(x_BTC)))

    def found(self, x_BTC: Tensor, folded: Folded | None = None) -> Found:
        """`folded`: c_attn with what x's norm left out, if `folds` named it."""
        if self.fused and _leaves_to_norm(self.c_proj, self.resid_dropout):
            y_BTC = _product(self.c_proj, self._gathered(x_BTC, folded))
            return Found(y_BTC, self.c_proj.bias, _dropout_p(self.resid_dropout))
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
        self.dropout = _dropout(config)

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
        return Found(y_BTC, self.c_proj.bias, _dropout_p(self.dropout))

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
        self.ln_1 = _norm(config)
        self.attn = Attention(config)
        self.ln_2 = _norm(config)
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


class Transformer(nn.Module):
    """All but the head: the token and position tables, the blocks, the last norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.fused = config.norm == "fuseline"
        self.wte = nn.Embedding(config.padded_vocab_size, config.embed_dim)
        self.wpe = nn.Embedding(config.block_size, config.embed_dim)
        self.drop = _dropout(config)
        self.h = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.ln_f = _norm(config)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.with_table(tokens_BT)[0]

    def with_table(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """What the last norm gives, and the token table as a tied head reads it (`embedding_and_table`)."""
        T = tokens_BT.shape[1]
        if self.block_size < T:
            raise InputError(
                f"The sequence has {T} tokens, and this model's block_size is {self.block_size}. "
                "Crop the sequence, or make the model with a larger block_size."
            )
        seeds = self._seeds(tokens_BT.device)
        if self.fused and is_plain(self.wte, nn.Embedding) and is_plain(self.wpe, nn.Embedding):
            p, tables = _dropout_p(self.drop), (self.wte.weight, self.wpe.weight)
            seed = seeds[0] if p else None
            x_BTC, table_VC = embedding_and_table(tokens_BT, *tables, p=p, seed=seed)
        else:
            table_VC = self.wte.weight
            # Rows of the table itself, rather than a lookup by arange: one op less each way.
            x_BTC = self.drop(self.wte(tokens_BT) + self.wpe.weight[:T])
        found = None
        for layer, block in enumerate(self.h):
            x_BTC, found = block(x_BTC, found, seeds[2 * layer : 2 * layer + 2])
        return _add_norm(self.ln_f, found, x_BTC, seeds[-1])[0], table_VC

    def _seeds(self, device: torch.device) -> Sequence[Tensor | None]:
        """Of the embedding and of the norms after branches: drawn in one kernel where ops drop."""
        count = 2 * len(self.h) + 1
        drops = self.fused and _dropout_p(self.drop) > 0
        return draw_seed(device, count).split(1) if drops else [None] * count


class GPT(nn.Module):
    """The language model. `GPT(preset("gpt2"))` has fresh weights, drawn as GPT-2's were."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.attention not in ops.attention_backends.BACKENDS:
            raise unknown_name("attention backend", config.attention, ops.attention_backends.BACKENDS)
        self.config = config
        device = torch.get_default_device()
        # On "meta" the layers' own initializations cost nothing; _init_weights draws each weight once.
        with torch.device("meta"):
            self.transformer = Transformer(config)
            self.lm_head = nn.Linear(config.embed_dim, config.padded_vocab_size, bias=False)
        self.to_empty(device=device)
        self.transformer.wte.weight = self.lm_head.weight
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Normal with deviation 0.02, norms 1, biases 0; projections into the residual stream are scaled by
        1/sqrt(2L), since 2L of them add up in it (GPT-2 paper, section 2.3)."""
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.num_layers))
            elif name == "transformer.wte.weight":
                # Padding rows take no draws, so that a padded model starts equal to the unpadded one.
                nn.init.normal_(parameter[: self.config.vocab_size], std=0.02)
                nn.init.zeros_(parameter[self.config.vocab_size :])
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocab_size] of the token after each position; or, given targets, the mean
        cross-entropy in nats over those that are not -1, a scalar (see `GPTConfig.loss`).

        `tokens_BT`, `targets_BT`: int64, ids below vocab_size. `InputError` if T is over block_size.
        """
        if targets_BT is None:
            return self._logits(self.transformer(tokens_BT))[..., : self.config.vocab_size]
        if self.config.loss == "fuseline-linear":
            return self._fused_loss(tokens_BT, targets_BT.reshape(-1))
        return self._loss(self.transformer(tokens_BT).flatten(0, 1), targets_BT.reshape(-1))

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor | None, attend: Attend) -> Tensor:
        """The stream after the last layer, [B, T, C], without dropout; `positions_BT` (0, 1, .. if absent) is
        where the tokens stand, and `attend` gathers for each layer (`models/heads.py`)."""
        T, tables = tokens_BT.shape[1], self.transformer
        places = tables.wpe.weight[:T] if positions_BT is None else tables.wpe(positions_BT)
        x_BTC = tables.wte(tokens_BT) + places
        for layer, block in enumerate(cast(Sequence[Block], tables.h)):
            x_BTC = block.continued(x_BTC, layer, attend, self.config)
        return x_BTC

    def logits(self, x_C: Tensor) -> Tensor:
        """Logits [..., vocab_size] of what `hidden` returned."""
        fused = self.config.norm == "fuseline"
        logits_V = branch(self.lm_head, x_C, norm=self.transformer.ln_f, fused=fused)
        return logits_V[..., : self.config.vocab_size]

    def _fused_loss(self, tokens_BT: Tensor, targets_N: Tensor) -> Tensor:
        """The head and its loss as one op; the logits are never stored whole."""
        body, head_VC = self.transformer, self.lm_head.weight
        if head_VC is body.wte.weight and is_plain(body, Transformer) and not _is_replaced(body):
            x_BTC, head_VC = body.with_table(tokens_BT)
        else:
            x_BTC = body(tokens_BT)
        x_NC, device = x_BTC.flatten(0, 1), x_BTC.device.type
        if torch.is_autocast_enabled(device):
            x_NC = x_NC.to(torch.get_autocast_dtype(device))
        vocab_size = self.config.vocab_size
        return ops.linear_cross_entropy(
            x_NC, head_VC, targets_N, ignore_index=IGNORE_INDEX, vocab_size=vocab_size
        )

    def _loss(self, x_NC: Tensor, targets_N: Tensor) -> Tensor:
        if self.config.loss == "fuseline":
            logits_NV = self.lm_head(x_NC)
            # In fp16 a gradient that is written before the loss is scaled would vanish.
            early = logits_NV.dtype is not torch.float16
            # A compiler would copy what is overwritten; eagerly nobody else reads these logits.
            inplace = early and not torch.compiler.is_compiling()
            options: dict[str, Any] = {"ignore_index": IGNORE_INDEX, "vocab_size": self.config.vocab_size}
            return ops.cross_entropy(logits_NV, targets_N, **options, grad_in_forward=early, inplace=inplace)
        logits_NV = self._logits(x_NC)
        if self.config.loss == "float32" and logits_NV.dtype.itemsize < 4:
            logits_NV = logits_NV.float()
        return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE_INDEX)

    def next_token_logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, vocab_size] of the token after the last one; the head runs on that position alone."""
        return self._logits(self.transformer(tokens_BT)[:, -1])[:, : self.config.vocab_size]

    def _logits(self, x_C: Tensor) -> Tensor:
        """Logits [..., padded_vocab_size], the padding at -inf.

        A softmax then gives the padding probability 0 and gradient 0, exactly: the loss is that of the
        unpadded model. The fill goes through a detached view because the head's backward needs no word of
        it: recorded, it would cost a copy of all gradients of the logits.
        """
        logits_V = self.lm_head(x_C)
        if self.config.padded_vocab_size != self.config.vocab_size:
            logits_V.detach()[..., self.config.vocab_size :].fill_(-math.inf)
        return logits_V

    def num_parameters(self, non_embedding: bool = True) -> int:
        """Parameters, padding rows left out; without the position table unless `non_embedding` is False
        (the token table stays: the head uses it). nanoGPT counts so, and `timing.flops` expects it."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.embed_dim
        count = sum(parameter.numel() for parameter in self.parameters()) - padding
        return count - self.transformer.wpe.weight.numel() if non_embedding else count

    def crop_block_size(self, block_size: int) -> None:
        """Forget the positions from `block_size` on, in place: a pretrained model made shorter."""
        if not 1 <= block_size <= self.config.block_size:
            raise InputError(
                f"block_size {block_size} does not lie in 1..{self.config.block_size}: "
                "a model can be cropped to fewer positions, not given new ones."
            )
        self.config = replace(self.config, block_size=block_size)
        self.transformer.block_size = block_size
        self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].detach().clone())
