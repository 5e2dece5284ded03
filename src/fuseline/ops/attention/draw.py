"""Random tensors for a problem: for tests, benchmarks and tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fuseline.ops.attention.attention import attention
from fuseline.ops.attention.problem import Problem

SOFT_CAP = 20.0


@dataclass(frozen=True)
class Drawn:
    """q, k, v and the options of `ops.attention`; `wanted` are the tensors that want gradients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: Mapping[str, Any]
    wanted: tuple[torch.Tensor, ...]

    def run(self, backend: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return attention(self.q, self.k, self.v, **self.options, backend=backend)


def draw(problem: Problem, seed: int = 0) -> Drawn:
    """Fresh tensors; q, k and v lie as [B, T, H, D], as projections leave them.

    A mask over keys alone pads: each batch sees its first keys. Others hide a fifth at random, and no row
    sees nothing. Packed sequences have about the same length.
    """
    device = problem.device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    def heads(count: int, rows: int) -> torch.Tensor:
        return normal(problem.batch, rows, count, problem.head_dim).to(problem.dtype).transpose(1, 2)

    q = heads(problem.heads, problem.seqlen_q)
    k, v = (heads(problem.kv_heads, problem.seqlen_k) for _ in range(2))
    options: dict[str, Any] = {
        "causal": problem.causal,
        "window": (problem.window_left, problem.window_right),
        "dropout_p": problem.dropout_p,
        "return_lse": problem.lse,
    }
    wanted = [q, k, v]
    if problem.mask != "none":
        mask = _mask(problem, generator)
        options["mask"] = mask
        if problem.mask == "float_grad":
            wanted.append(mask)
    if problem.soft_cap:
        options["soft_cap"] = SOFT_CAP
    if problem.sinks:
        options["sinks"] = normal(problem.heads)
        wanted.append(options["sinks"])
    if problem.seeded:
        options["seed"] = torch.tensor([seed + 17], device=device)
    if problem.sequences:
        for name, rows, longest in (
            ("q", problem.seqlen_q, problem.max_seqlen_q),
            ("k", problem.seqlen_k, problem.max_seqlen_k),
        ):
            cuts = [round(i * rows / problem.sequences) for i in range(problem.sequences + 1)]
            options[f"cu_seqlens_{name}"] = torch.tensor(cuts, dtype=torch.int32, device=device)
            options[f"max_seqlen_{name}"] = longest
    if problem.wants_grad:
        for x in wanted:
            x.requires_grad_()
    return Drawn(q, k, v, options, tuple(wanted) if problem.wants_grad else ())


def _mask(problem: Problem, generator: torch.Generator) -> torch.Tensor:
    full = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    shape = [size if name in problem.mask_dims else 1 for name, size in zip("bhts", full, strict=True)]
    device = problem.device
    if problem.mask != "bool":
        return torch.randn(shape, generator=generator, device=device).to(problem.dtype)
    if problem.mask_dims.strip("b") == "s":
        keys = torch.arange(shape[3], device=device)
        length = 1 + torch.rand((shape[0], 1, 1, 1), generator=generator, device=device) * shape[3]
        return keys < length
    mask = torch.rand(shape, generator=generator, device=device) < 0.8
    mask[..., 0] = True
    return mask
