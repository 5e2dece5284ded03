"""A whole decoding step of a small language model for one row, in one launch: a token in, logits out.

    x = token_table[token] (+ position_table[length])
    each layer: x += out(attention(qkv(norm(x)))), then x += down(activation(up(mlp_norm(x))))
    logits = head norm(x)

Between qkv and out is `decode_attention`; the token's key and value are written to the cache. The most likely
token overwrites the one that was read and the length counts up, so that the next step can follow without
waiting for the host.

Reading a model of a hundred million parameters takes less time than launching its parts one after the other.
Here the blocks of one launch stay for the whole step, pass elements to each other as soon as they are ready,
and fetch the weights of later products in the meantime (`csrc/kernels/step/step_kernel.cuh`).

dtypes: bfloat16; the residual stream x is in float32. Results have the same bits in every run. It is
for inference and has no gradient. It is not a registered op, because it changes its arguments and the
contract is for functions that do not.

Shapes: L layers, C channels, H heads, K key heads, D head_dim, F ffn_dim, S positions, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseline import native
from fuseline.ops.decode_attention import LayerCache
from fuseline.ops.decode_attention import reference as attend

PARTS = ("norm", "qkv", "out", "mlp_norm", "up", "down")
MOST_LAYERS = 64
MOST_BYTES = 2**30  # of weights: beyond, what launches cost is little


@dataclass(frozen=True)
class StepModel:
    """A model's weights as a step reads them.

    `layers` has the weights of `PARTS` for each layer: norms [C], linears [outputs, inputs]; `biases` has the
    biases in the same way, None where there is none. With "swiglu", `up` holds the gates first and then what
    they multiply. `norm_kind` is "layer" or "rms". `head` and `token_table` are [V or more, C], of which the
    first `vocab_size` rows are tokens. `cos` and `sin` are [positions, D / 2].
    """

    layers: tuple[tuple[Tensor, ...], ...]
    biases: tuple[tuple[Tensor | None, ...], ...]
    token_table: Tensor
    norm: Tensor
    head: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_kind: str
    activation: str
    eps: float
    position_table: Tensor | None = None
    norm_bias: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    window: int | None = None

    @property
    def ffn_dim(self) -> int:
        return self.layers[0][5].shape[1]


def workspace(model: StepModel) -> Tensor | None:
    """Memory through which the blocks exchange values; None if one launch cannot compute steps of `model`."""
    head = model.head
    if (
        head.device.type != "cuda"
        or head.dtype is not torch.bfloat16
        or not 0 < len(model.layers) <= MOST_LAYERS
    ):
        return None
    tensors = [head, *(weight for layer in model.layers for weight in layer)]
    if sum(t.nbytes for t in tensors) > MOST_BYTES:
        return None
    if any(not t.is_contiguous() or t.dtype is not head.dtype or t.data_ptr() % 16 for t in tensors):
        return None
    if not native.ready("cuda"):
        return None
    size = torch.ops.fuseline.decode_step_workspace.default(
        head,
        len(model.layers),
        head.shape[1],
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.ffn_dim,
        model.vocab_size,
        model.activation,
    )
    return torch.zeros(size, dtype=torch.uint8, device=head.device) if size else None


def decode_step(
    model: StepModel, token: Tensor, k: Tensor, v: Tensor, length: Tensor, workspace: Tensor
) -> Tensor:
    """Logits [1, V] of the token that follows `token`; `token` becomes the most likely one.

    Args:
        token: [1] int64. k, v: the cache [L, 1, K, S, D] in the model's dtype; the token's key and value are
        written at `length`. length: [1] int64, the number of positions in the cache; it is one more
        afterwards. workspace: from `workspace(model)`, one for each chain of steps.

    Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    return torch.ops.fuseline.decode_step.default(
        token,
        workspace,
        k,
        v,
        length,
        [weight for layer in model.layers for weight in layer],
        [bias for layer in model.biases for bias in layer],
        model.token_table,
        model.position_table,
        model.cos,
        model.sin,
        model.norm,
        model.norm_bias,
        model.head,
        model.num_heads,
        model.vocab_size,
        model.window or 0,
        model.eps,
        1.0 / math.sqrt(model.head_dim),
        model.norm_kind,
        model.activation,
    )


def reference(model: StepModel, token: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    """The definition in plain PyTorch, for every device and dtype."""
    x = model.token_table[token]
    if model.position_table is not None:
        x = x + model.position_table[length]
    for layer, (weights, biases) in enumerate(zip(model.layers, model.biases, strict=True)):
        norm, qkv, out, mlp_norm, up, down = zip(weights, biases, strict=True)
        y = attend(
            F.linear(_normed(model, x, *norm), *qkv),
            LayerCache(k[layer], v[layer], length),
            heads=model.num_heads,
            count=k.shape[3],
            cos=model.cos,
            sin=model.sin,
            window=model.window,
        )
        x = x + F.linear(y, *out)
        x = x + F.linear(_activated(model, F.linear(_normed(model, x, *mlp_norm), *up)), *down)
    logits = F.linear(_normed(model, x, model.norm, model.norm_bias), model.head[: model.vocab_size])
    token.copy_(logits.argmax(-1))
    length += 1
    return logits


def _normed(model: StepModel, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if model.norm_kind == "rms":
        return F.rms_norm(x, weight.shape, weight, model.eps)
    return F.layer_norm(x, weight.shape, weight, bias, model.eps)


def _activated(model: StepModel, x: Tensor) -> Tensor:
    if model.activation == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(x, approximate="tanh" if model.activation == "gelu_tanh" else "none")
