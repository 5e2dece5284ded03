"""GPT-2. Read this file and its blocks (`gpt_block.py`) from top to bottom, and you know the model.

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
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseline import ops
from fuseline.errors import InputError, unknown_name
from fuseline.models.gpt_block import Block, add_norm, dropout_p, is_replaced, make_dropout, make_norm
from fuseline.models.gpt_config import PRESETS, GPTConfig, preset
from fuseline.models.heads import Attend
from fuseline.nn import branch
from fuseline.nn.feed_forward import is_plain
from fuseline.ops.embedding import embedding_and_table
from fuseline.ops.philox import draw_seed

__all__ = ["GPT", "PRESETS", "GPTConfig", "Transformer", "preset"]

IGNORE_INDEX = -1


class Transformer(nn.Module):
    """All but the head: the token and position tables, the blocks, the last norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.fused = config.norm == "fuseline"
        self.wte = nn.Embedding(config.padded_vocab_size, config.embed_dim)
        self.wpe = nn.Embedding(config.block_size, config.embed_dim)
        self.drop = make_dropout(config)
        self.h = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.ln_f = make_norm(config)

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
            p, tables = dropout_p(self.drop), (self.wte.weight, self.wpe.weight)
            seed = seeds[0] if p else None
            x_BTC, table_VC = embedding_and_table(tokens_BT, *tables, p=p, seed=seed)
        else:
            table_VC = self.wte.weight
            # Rows of the table itself, rather than a lookup by arange: one op less each way.
            x_BTC = self.drop(self.wte(tokens_BT) + self.wpe.weight[:T])
        found = None
        for layer, block in enumerate(self.h):
            x_BTC, found = block(x_BTC, found, seeds[2 * layer : 2 * layer + 2])
        return add_norm(self.ln_f, found, x_BTC, seeds[-1])[0], table_VC

    def _seeds(self, device: torch.device) -> Sequence[Tensor | None]:
        """Of the embedding and of the norms after branches: drawn in one kernel where ops drop."""
        count = 2 * len(self.h) + 1
        drops = self.fused and dropout_p(self.drop) > 0
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
        if head_VC is body.wte.weight and is_plain(body, Transformer) and not is_replaced(body):
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
