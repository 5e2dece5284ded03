"""The end of a decoding step that takes the likeliest token, in one launch: what it leaves for the next step.

    tokens[row] = argmax(logits[row])
    lengths[row] += 1

As `torch.argmax` has it, the first of equal logits counts, and NaN is larger than all others.

dtypes: float32, float16, bfloat16; others and other devices run the reference. Results are the same bits from
run to run. For inference: there is no gradient. It is not among the registered ops, whose contract is of
functions that change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseline import native
from fuseline.ops.op import DTYPES


def reference(logits: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    """The definition in plain PyTorch, for every device and dtype."""
    tokens.copy_(logits.argmax(-1))
    lengths += 1


def fused(logits: Tensor) -> bool:
    """Whether the kernel computes this."""
    return (
        logits.device.type == "cuda"
        and logits.dtype in DTYPES
        and (logits.shape[-1] == 1 or logits.stride(-1) == 1)
        and native.ready("cuda")
    )


def take_likeliest(logits: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    """Write the likeliest token of each row to `tokens` and count each of `lengths` on.

    Args:
        logits: [B, V].
        tokens, lengths: [B] int64, dense.

    Raises ValueError for shapes and dtypes that do not fit.
    """
    if fused(logits):
        torch.ops.fuseline.take_likeliest.default(logits, tokens, lengths)
        return
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(
            f"take_likeliest: logits have shape {list(logits.shape)}; they are [B, V], with V of 1 or more."
        )
    for name, held in (("tokens", tokens), ("lengths", lengths)):
        if held.shape != logits.shape[:1] or held.dtype != torch.int64 or held.device != logits.device:
            raise ValueError(
                f"take_likeliest: {name} are {held.dtype} of shape {list(held.shape)} on {held.device}; they "
                "are int64, one a row, on the logits' device."
            )
    reference(logits, tokens, lengths)
