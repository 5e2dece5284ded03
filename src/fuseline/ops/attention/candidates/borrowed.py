"""`cudnn_fuseline`, `flash_fuseline`: the forward pass of another kernel, and our backward pass.

Ours takes one pass over the scores where it can, repeats its bits and writes packed gradients in place; the
forward of cuDNN is faster than ours. All that passes between them is the output and the logarithms of the
rows' sums. The operator calls the other's kernel itself, so that a recorded step or a compiled graph sees one
operator (csrc/torch/attention_gpu.cpp).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fuseline.ops.attention.candidate import HALF, Candidate, refuse_cuda, refuse_extras
from fuseline.ops.attention.candidates import cudnn, flash, fuseline
from fuseline.ops.attention.problem import Problem


def _refuses(problem: Problem, forward: Candidate) -> str | None:
    if not problem.wants_grad:
        return f"without a gradient it is {forward.name}"
    # Whose limits are added as a mask, or where rows see nothing, the two need not agree.
    reason = refuse_cuda(problem, HALF, None) or refuse_extras(
        problem, "mask", "window", "packing", "dropout", "soft_cap", "sinks"
    )
    if reason is None and problem.causal != "none" and not problem.is_square:
        reason = "with causality it takes as many keys as queries"
    return (
        reason
        or fuseline.CANDIDATE.supports(problem)
        or forward.supports(replace(problem, direction="fw", lse=False))
    )


def _candidate(forward: Candidate, forward_by: int, said: str) -> Candidate:
    return Candidate(
        f"{forward.name}_fuseline",
        f"{said} forward, Fuseline's backward",
        partial(_refuses, forward=forward),
        partial(fuseline.run, forward_by=forward_by),
        offered_on=("cuda",),
        run_packed=partial(fuseline.run_packed, forward_by=forward_by),
        parts=(forward.name, "fuseline"),
    )


# The numbers are those of `ForwardBy` in csrc/torch/attention.h.
CANDIDATES = (_candidate(cudnn.CANDIDATE, 1, "cuDNN's"), _candidate(flash.CANDIDATE, 2, "FlashAttention-2's"))
