"""What a candidate's result is worth on one problem: its error against float64, and the memory it needs."""

from __future__ import annotations

from typing import Any

import torch

from fuseline.ops.attention.call import make_call
from fuseline.ops.attention.draw import Drawn
from fuseline.ops.attention.measure import whole_call
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.reference import attend
from fuseline.timing import peak_memory_gib, reset_peak_memory

MOST_SCORES = 2**26  # in float64 half a GiB, and the reference holds several
LARGEST_ERROR = {2: 0.05, 4: 1e-3, 8: 1e-8}
"""By bytes of a number: beyond this it is another computation, not rounding."""


class Truth:
    """A problem in float64: the first batch's heads of the first key head, so that it fits in memory."""

    def __init__(self, problem: Problem, drawn: Drawn) -> None:
        self._group = problem.heads // problem.kv_heads
        self._drawn = drawn
        q, k, v = (self._cut(x, i).detach().double() for i, x in enumerate((drawn.q, drawn.k, drawn.v)))
        self._tensors = [x.requires_grad_(problem.wants_grad) for x in (q, k, v)]
        out, _ = attend(make_call(*self._tensors, **self._options(problem)))
        self._out = out.detach()
        self._grads: tuple[torch.Tensor, ...] = ()
        if problem.wants_grad:
            generator = torch.Generator(q.device).manual_seed(99)
            self.grad_out = torch.randn(
                drawn.q.shape, generator=generator, device=q.device, dtype=torch.float32
            ).to(drawn.q.dtype)
            self._grads = torch.autograd.grad(out, self._tensors, self._cut(self.grad_out, 0).double())

    @staticmethod
    def fits(problem: Problem) -> bool:
        """Whether it can be computed at all: in memory, and not of random dropout."""
        group = problem.heads // problem.kv_heads
        scores = group * problem.seqlen_q * problem.seqlen_k
        return scores <= MOST_SCORES and (problem.dropout_p == 0 or problem.seeded)

    def error(self, backend: str) -> float:
        """The worst relative distance of output and gradients of q, k and v."""
        found = self._drawn.run(backend)
        out = found[0] if isinstance(found, tuple) else found
        worst = _away(self._cut(out, 0), self._out)
        if self._grads:
            wanted = (self._drawn.q, self._drawn.k, self._drawn.v)
            grads = torch.autograd.grad(out, wanted, self.grad_out)
            for i, (mine, right) in enumerate(zip(grads, self._grads, strict=True)):
                worst = max(worst, _away(self._cut(mine, i), right))
        return worst

    def _cut(self, x: torch.Tensor, position: int) -> torch.Tensor:
        return x[:1, : self._group if position == 0 else 1]

    def _options(self, problem: Problem) -> dict[str, Any]:
        options = dict(self._drawn.options)
        if options.get("mask") is not None:
            options["mask"] = options["mask"].detach()[:1, : self._group]
            if options["mask"].is_floating_point():
                options["mask"] = options["mask"].double()
        if options.get("sinks") is not None:
            options["sinks"] = options["sinks"].detach()[: self._group]
        options.pop("return_lse")
        return options


def peak_gib(drawn: Drawn, backend: str, device: torch.device) -> float | None:
    """Most memory beside the inputs while the call, which has run before, runs; None on a CPU."""
    if device.type != "cuda":
        return None
    call = whole_call(drawn, backend, torch.randn_like(drawn.q) if drawn.wanted else None)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device) / 2**30
    reset_peak_memory(device)
    call()
    return (peak_memory_gib(device) or 0.0) - before


def _away(found: torch.Tensor, wanted: torch.Tensor) -> float:
    norm = float(wanted.norm())
    distance = float((found.detach().double() - wanted).norm())
    if distance != distance:
        return float("inf")
    return distance / norm if norm else distance
