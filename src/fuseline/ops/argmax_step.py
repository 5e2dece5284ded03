"""The end of a greedy decoding step in one launch: it takes the most likely token and counts the length up.

    tokens[row] = argmax(logits[row])
    lengths[row] += 1

As in `torch.argmax`, the first of several equal logits wins, and NaN is larger than every number.

dtypes: float32, float16, bfloat16; other dtypes and devices run the reference. Results have the same bits in
every run. It is for inference and has no gradient. It is not a registered op, because it changes its
arguments and the contract is for functions that do not.
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
    """Whether the kernel supports these arguments."""
    return (
        logits.device.type == "cuda"
        and logits.dtype in DTYPES
        and (logits.shape[-1] == 1 or logits.stride(-1) == 1)
        and native.ready("cuda")
    )


def argmax_step(logits: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    """Write the most likely token of each row to `tokens` and add 1 to each of `lengths`.

    Args:
        logits: [B, V].
        tokens, lengths: [B] int64, dense.

    Raises ValueError for shapes and dtypes that do not fit.
    """
    if fused(logits):
        torch.ops.fuseline.argmax_step.default(logits, tokens, lengths)
        return
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(
            f"argmax_step: logits have shape {list(logits.shape)}; they are [B, V], with V of 1 or more."
        )
    for name, held in (("tokens", tokens), ("lengths", lengths)):
        if held.shape != logits.shape[:1] or held.dtype != torch.int64 or held.device != logits.device:
            raise ValueError(
                f"argmax_step: {name} are {held.dtype} of shape {list(held.shape)} on {held.device}; they "
                "are int64, one a row, on the logits' device."
            )
    reference(logits, tokens, lengths)
