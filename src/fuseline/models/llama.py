"""Llama, whole: read it from top to bottom and you know the model, and Mistral, Qwen2 and Qwen3 with it.

Beside GPT-2 (`models/gpt.py`) five things differ. Positions are not added to the tokens: queries and keys are
turned by an angle that grows with the position (*RoPE*), so that their product sees how far apart they are.
Norms have neither mean nor bias (*RMSNorm*). The MLP multiplies one half of what it makes by the SiLU of the
other (*SwiGLU*). Several query heads share one head of keys and values (*GQA*), which makes the cache of a
generation small. The head has weights of its own, unless `tied`.

Queries, keys and values are one product, and so are gate and up: a token alone is bound by reading weights,
and few large reads are faster than many small ones. `models/llama_hugging_face.py` takes published weights
apart and together.

Shapes: B batch, T time, C channels (embed_dim), H heads, D head_dim, F ffn_dim, V vocabulary.
Source: Touvron et al., "LLaMA", 2023; Dubey et al., "The Llama 3 herd of models", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseline import ops
from fuseline.errors import InputError
from fuseline.models.heads import Attend, Heads, whole_sequence
from fuseline.models.llama_config import PRESETS, LlamaConfig, RopeScaling, preset
from fuseline.nn import RMSNorm, RotaryEmbedding, branch
from fuseline.nn.feed_forward import is_plain
from fuseline.nn.fp8_linear import Fp8Linear, fp8_feed_forward
from fuseline.ops.rope import rope_angles
from fuseline.timing.memory import available

__all__ = ["PRESETS", "Attention", "Block", "Llama", "LlamaConfig", "RopeScaling", "Rotary", "preset"]

IGNORE_INDEX = -1


class Rotary(RotaryEmbedding):
    """Tables of cosines and sines, one for the whole model, the frequencies stretched as the config says."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.head_dim, config.rope_base)
        frequencies = stretched(
            rope_angles(torch.ones(1, device="cpu"), config.head_dim, config.rope_base)[0],
            config.rope_scaling,
        )
        angles = torch.arange(config.block_size, dtype=torch.float64, device="cpu")[:, None] * frequencies
        self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """The tables go where the model goes, and stay in float32: angles have no digits to lose."""
        tables = self.cos, self.sin
        super()._apply(fn, recurse)
        for name, before in zip(("cos", "sin"), tables, strict=True):
            after = getattr(self, name)
            if before is not None and before.dtype != after.dtype:
                setattr(self, name, before.to(after.device))
        return self


def check_positions(config: LlamaConfig, source: object) -> None:
    """`InputError`, naming `source`, if the tables of `Rotary` do not fit in this machine's memory: they are
    made for every position of the context."""
    needed = 3 * 8 * config.block_size * (config.head_dim // 2)  # angles, and what is made of them on the way
    free = available(torch.device("cpu"))
    if needed > free:
        raise InputError(
            f"{source}: the rotary tables of {config.block_size:,} positions take {needed / 2**30:.1f} GiB, "
            f"and {free / 2**30:.1f} are free. Give the model a shorter context."
        )


def stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Radians a position of each pair, [D / 2], after `scaling`."""
    if scaling.kind == "default":
        return frequencies
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original_length * frequencies / (2 * math.pi)  # in the length first trained on
    share = ((turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)).clamp(0.0, 1.0)
    return torch.lerp(slow, frequencies, share)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's product; by our op, unless there is more to the layer."""
    return ops.linear(x, layer.weight, layer.bias) if is_plain(layer, nn.Linear) else layer(x)


def _norm(width: int, config: LlamaConfig) -> nn.RMSNorm:
    return (RMSNorm if config.kernels == "fuseline" else nn.RMSNorm)(width, eps=config.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
        self.config, self.layer = config, layer
        self.norm = _norm(config.embed_dim, config)
        self.qkv = nn.Linear(config.embed_dim, (H + 2 * K) * D, bias=config.qkv_bias)
        self.out = nn.Linear(H * D, config.embed_dim, bias=config.out_bias)
        self.q_norm = _norm(D, config) if config.qk_norm else None
        self.k_norm = _norm(D, config) if config.qk_norm else None

    def heads(self, rotary: Rotary) -> Heads:
        config = self.config
        return Heads(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            rotary.cos,
            rotary.sin,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            config.eps,
            config.window_of(self.layer),
            config.kernels == "fuseline",
        )

    def forward(self, x_BTC: Tensor, rotary: Rotary, attend: Attend, following: nn.Module) -> Tensor:
        fused = self.config.kernels == "fuseline"
        qkv_BTN = branch(self.qkv, x_BTC, norm=self.norm, following=self.out, fused=fused)
        y_BTC = attend(self.layer, qkv_BTN, self.heads(rotary))
        return branch(self.out, y_BTC, residual=x_BTC, following=following, fused=fused)

    def found(self, normed_BTC: Tensor, rotary: Rotary) -> Tensor:
        """What a whole sequence adds to the stream."""
        qkv_BTN = _linear(self.qkv, normed_BTC)
        return _linear(self.out, whole_sequence(self.layer, qkv_BTN, self.heads(rotary)))


class MLP(nn.Module):
    """silu(gate) * up, and back to the stream's width."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.fused = config.kernels == "fuseline"
        self.norm = _norm(config.embed_dim, config)
        self.gate_up = nn.Linear(config.embed_dim, 2 * config.ffn_dim, bias=config.mlp_bias)
        self.down = nn.Linear(config.ffn_dim, config.embed_dim, bias=config.mlp_bias)

    def forward(self, x_BTC: Tensor, following: nn.Module) -> Tensor:
        y_BTF = branch(
            self.gate_up, x_BTC, norm=self.norm, activation="swiglu", following=self.down, fused=self.fused
        )
        return branch(self.down, y_BTF, residual=x_BTC, following=following, fused=self.fused)

    def found(self, normed_BTC: Tensor) -> Tensor:
        """What a whole sequence adds to the stream in training."""
        gate_up, down = self.gate_up, self.down
        if is_plain(gate_up, Fp8Linear) and is_plain(down, Fp8Linear) and gate_up.bias is None:
            return fp8_feed_forward(normed_BTC, gate_up, down, "swiglu")
        return _linear(down, ops.swiglu(_linear(gate_up, normed_BTC)))


class Block(nn.Module):
    """One layer: attention, then the MLP, each reading a normed copy of the stream and adding to it.
    `following` is the linear layer after it."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x_BTC: Tensor, rotary: Rotary, attend: Attend, following: nn.Module) -> Tensor:
        return self.mlp(self.attention(x_BTC, rotary, attend, self.mlp.gate_up), following)

    def is_plain(self) -> bool:
        """Whether nothing but the classes of this file computes it, so that norms may stand apart from it."""
        attention, mlp = self.attention, self.mlp
        parts = is_plain(self, Block) and is_plain(attention, Attention) and is_plain(mlp, MLP)
        return parts and is_plain(attention.norm, RMSNorm) and is_plain(mlp.norm, RMSNorm)


class Llama(nn.Module):
    """The language model. `Llama(preset("llama2-7b"))` has fresh weights: normal, deviation 0.02.

    Made under `torch.device("meta")` it has no weights, and `allot` gives it room for some.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # the layers' own draws cost nothing there
            self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
            self.blocks = nn.ModuleList([Block(config, layer) for layer in range(config.num_layers)])
            self.norm = _norm(config.embed_dim, config)
            self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        self.to_empty(device=device)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.rotary = Rotary(config).to(device)
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)

    def allot(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """Memory for the weights of a model made on "meta", holding nothing yet; and the rotary tables."""
        self.to(dtype).to_empty(device=device)
        if self.config.tied:
            self.head.weight = self.embedding.weight
        self.rotary = Rotary(self.config).to(device)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocab_size] of the token after each position; or, given targets, the mean
        cross-entropy in nats over those that are not -1, a scalar.

        `tokens_BT`, `targets_BT`: int64, ids below vocab_size. `InputError` if T is over block_size.
        """
        T = tokens_BT.shape[1]
        if self.config.block_size < T:
            raise InputError(
                f"The sequence has {T} tokens, and this model's block_size is {self.config.block_size}. "
                "Crop the sequence."
            )
        fused_loss = self.config.kernels == "fuseline" and is_plain(self.head, nn.Linear)
        if targets_BT is not None and fused_loss and self._trains_plainly():
            return self._fused_loss(self._normed(tokens_BT).flatten(0, 1), targets_BT.reshape(-1))
        x_BTC = self.hidden(tokens_BT, None, whole_sequence)
        if targets_BT is None:
            return self.logits(x_BTC)
        if fused_loss:
            return self._fused_loss(self.norm(x_BTC).flatten(0, 1), targets_BT.reshape(-1))
        logits_NV = self.logits(x_BTC).flatten(0, 1).float()
        return F.cross_entropy(logits_NV, targets_BT.reshape(-1), ignore_index=IGNORE_INDEX)

    def _trains_plainly(self) -> bool:
        blocks = cast(Sequence[Block], self.blocks)
        plain = self.training and is_plain(self.embedding, nn.Embedding) and is_plain(self.norm, RMSNorm)
        return plain and all(is_plain(block, Block) and block.is_plain() for block in blocks)

    def _normed(self, tokens_BT: Tensor) -> Tensor:
        """The last norm over a whole sequence in training. Each norm adds to the stream what the branch
        before it found, and leaves in the dtype that the next branch multiplies in."""
        blocks = cast(Sequence[Block], self.blocks)
        norms = [norm for block in blocks for norm in (block.attention.norm, block.mlp.norm)] + [self.norm]
        x_BTC = ops.embedding(tokens_BT, self.embedding.weight)
        device = x_BTC.device.type
        narrowed = torch.is_autocast_enabled(device) and x_BTC.dtype is torch.float32
        dtype = torch.get_autocast_dtype(device) if narrowed else None
        y_BTC = ops.rms_norm(x_BTC, norms[0].weight, norms[0].eps, out_dtype=dtype)
        for layer, norm in enumerate(norms[1:]):
            block = blocks[layer // 2]
            found = block.mlp.found(y_BTC) if layer % 2 else block.attention.found(y_BTC, self.rotary)
            y_BTC, x_BTC = ops.add_rms_norm(found, x_BTC, norm.weight, norm.eps)
        return y_BTC

    def _fused_loss(self, x_NC: Tensor, targets_N: Tensor) -> Tensor:
        """The head and its loss; the logits are never stored whole."""
        device = x_NC.device.type
        if torch.is_autocast_enabled(device):
            x_NC = x_NC.to(torch.get_autocast_dtype(device))
        return ops.linear_cross_entropy(x_NC, self.head.weight, targets_N, ignore_index=IGNORE_INDEX)

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor | None, attend: Attend) -> Tensor:
        """The stream after the last layer, [B, T, C]. `attend` knows where the tokens stand, and gathers for
        each layer; `positions_BT` is for models that add positions to their tokens, and goes unread."""
        fused = self.config.kernels == "fuseline" and self.training
        if fused and is_plain(self.embedding, nn.Embedding):  # its gradient needs no sort
            x_BTC = ops.embedding(tokens_BT, self.embedding.weight)
        else:
            x_BTC = self.embedding(tokens_BT)
        blocks = cast(Sequence[Block], self.blocks)
        for layer, block in enumerate(blocks):
            following = self.head if layer + 1 == len(blocks) else blocks[layer + 1].attention.qkv
            x_BTC = block(x_BTC, self.rotary, attend, following)
        return x_BTC

    def logits(self, x_C: Tensor) -> Tensor:
        """Logits [..., vocab_size] of what `hidden` returned."""
        return branch(self.head, x_C, norm=self.norm, fused=self.config.kernels == "fuseline")

    def num_parameters(self, non_embedding: bool = True) -> int:
        """Parameters; without the token table unless it is the head as well, or `non_embedding` is False."""
        count = sum(parameter.numel() for parameter in self.parameters())
        return count - self.embedding.weight.numel() if non_embedding and not self.config.tied else count
