"""Run a call by the candidate that is chosen for it."""

from __future__ import annotations

import torch

from fuseline.ops.attention import choice
from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import Attended, UnfitError
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.reference import attend
from fuseline.ops.transforms import in_forward_mode


def run(call: Call, backend: str, qkv: torch.Tensor | None = None) -> Attended:
    """By the candidate that is chosen, or the next one where that finds that it cannot. `qkv` is the packed
    tensor of which the call's q, k and v are views; candidates that take it give its gradient whole."""
    if backend == choice.PICK and in_forward_mode():
        return attend(call)  # torch's kernels, and ours, have no rules for it
    packed = qkv is not None
    if torch.compiler.is_compiling():
        return _run_by(choice.choose(call, backend, packed=packed), call, qkv)
    while True:  # each turn takes one candidate away, and `choose` raises when none is left
        name = choice.choose(call, backend, packed=packed)
        try:
            return _run_by(name, call, qkv)
        except UnfitError as why:
            choice.set_aside(call, name, str(why))


def _run_by(name: str, call: Call, qkv: torch.Tensor | None) -> Attended:
    candidate = CANDIDATES[name]
    if qkv is not None and candidate.run_packed is not None:
        return candidate.run_packed(call, qkv)
    return candidate.run(call)
