"""What Fuseline's own kernels would launch for an attention, as csrc/kernels/plans/attention.h decides it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuseline.native.gpus import Gpu
from fuseline.ops.attention.problem import CAUSAL, Problem
from fuseline.ops.op import DTYPES

_MASKS = {"none": 0, "bool": 1, "float": 2, "float_grad": 2}


@dataclass(frozen=True)
class Launch:
    """One kernel of a call. `blocks` of those named `short_...` are problems: as many blocks as the GPU holds
    take them in turn."""

    kernel: str
    blocks: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Launches:
    """A call's launches in their order, none where the kernels do not take it. Where `sum_left` is the last,
    it and the one before it are for some tiles of rows, and come again until there are no more."""

    reason: str
    workspace_bytes: int
    each: tuple[Launch, ...]


def launches(problem: Problem, gpu: Gpu, backward: bool) -> Launches:
    """What the forward or the backward of a problem with whole tensors launches. Needs the native core."""
    p = problem
    sizes = [p.batch, p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim]
    kinds = [DTYPES.index(p.dtype), CAUSAL.index(p.causal), _MASKS[p.mask]]
    window = [p.window_left, p.window_right]
    mask_dims = [p.mask != "none" and name in p.mask_dims for name in "bhts"]
    packed = [p.sequences, p.max_seqlen_q, p.max_seqlen_k]
    options = float(p.soft_cap), p.dropout_p, p.sinks, p.mask == "float_grad", backward
    kernels, reason, (workspace, *numbers) = torch.ops.fuseline.plan_attention(
        gpu.numbers(), sizes, kinds, window, mask_dims, packed, *options
    )
    each = tuple(Launch(kernel, *numbers[3 * i : 3 * i + 3]) for i, kernel in enumerate(kernels))
    return Launches(reason, workspace, each)
