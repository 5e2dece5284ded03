"""What a candidate is, and the reasons that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuseline.ops.attention.call import FLOATING, Call
from fuseline.ops.attention.problem import Problem

Attended = tuple[torch.Tensor, torch.Tensor | None]
"""out [B, H, T, D], and lse [B, H, T] in fp32 where the call asked for it."""


class UnfitError(RuntimeError):
    """What a candidate raises that can not run a call after all: only trying it tells."""


HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Candidate:
    """One way to compute attention.

    `supports` says why it cannot run a problem (None: it can), and `run` computes. The picker may choose it
    on the kinds of device in `offered_on`; elsewhere it runs on request. `varies` says why the bits of two
    runs may differ (None: they do not). `is_linear`: it does not hold [B, H, T, S] in memory. `compiles`: it
    compiles each new shape for seconds. `traces`: torch.compile can trace it into its graph. `run_packed`
    computes from one packed tensor, of which the call's q, k and v are views, and gives its gradient whole;
    None where there is no such kernel. `parts`: the candidates whose forward and backward passes it is put
    together of, or None; where it was not measured its time follows from theirs.
    """

    name: str
    summary: str
    supports: Callable[[Problem], str | None]
    run: Callable[[Call], Attended]
    offered_on: tuple[str, ...] = ("cpu", "cuda")
    varies: Callable[[Problem], str | None] = lambda problem: None
    is_linear: bool = True
    compiles: bool = False
    traces: bool = True
    run_packed: Callable[[Call, torch.Tensor], Attended] | None = None
    parts: tuple[str, str] | None = None

    def refuses(self, problem: Problem) -> str | None:
        """Why this candidate does not run the problem as asked for; None where it does."""
        reason = self.supports(problem)
        if reason is None and problem.deterministic:
            reason = self.varies(problem)
        return reason


def refuse_dtype(problem: Problem, dtypes: tuple[torch.dtype, ...] = FLOATING) -> str | None:
    if problem.dtype in dtypes:
        return None
    return f"it takes {', '.join(map(_name, dtypes))}, not {_name(problem.dtype)}"


def refuse_cuda(
    problem: Problem,
    dtypes: tuple[torch.dtype, ...],
    largest_head_dim: int | None,
    capability: tuple[int, int] = (8, 0),
) -> str | None:
    """Limits that fused CUDA kernels share: device, dtypes, not empty, head dims of whole 16-byte pieces."""
    device = problem.device
    if device.type != "cuda":
        return f"it is a CUDA kernel; the device is {device.type}"
    reason = refuse_dtype(problem, dtypes)
    if reason is not None:
        return reason
    if problem.is_empty:
        return "there is nothing to compute"
    piece = 16 // problem.dtype.itemsize
    if problem.head_dim % piece:
        return (
            f"it takes head dims that are multiples of {piece} at {_name(problem.dtype)}, "
            f"not {problem.head_dim}"
        )
    if largest_head_dim is not None and problem.head_dim > largest_head_dim:
        return f"it takes head dims up to {largest_head_dim}, not {problem.head_dim}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < capability:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"it needs compute capability {capability[0]}.{capability[1]}; the GPU has {found}"
    return None


def refuse_extras(problem: Problem, *names: str) -> str | None:
    """The first of these features that the problem has, as a reason: of "mask", "mask_grad", "soft_cap",
    "sinks", "seed", "packing", "window", "lse", "lse_grad", "gqa", "dropout"."""
    has = {
        "mask": (problem.mask != "none", "it takes no mask"),
        "mask_grad": (problem.mask == "float_grad", "it gives the mask no gradient"),
        "soft_cap": (problem.soft_cap, "it has no soft cap"),
        "sinks": (problem.sinks, "it has no sinks"),
        "seed": (problem.seeded, "its dropout draws from torch's generator, not from a seed"),
        "packing": (problem.sequences > 0, "it takes no packed sequences"),
        "window": (problem.is_windowed, "it has no sliding window"),
        "lse": (problem.lse, "it returns no lse"),
        "lse_grad": (problem.lse and problem.wants_grad, "its lse has no gradient"),
        "gqa": (problem.heads != problem.kv_heads, "it wants as many key heads as query heads"),
        "dropout": (problem.dropout_p > 0, "it has no dropout"),
    }
    return next((has[name][1] for name in names if has[name][0]), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
