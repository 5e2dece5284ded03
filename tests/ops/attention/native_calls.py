"""Calls of the native op `fuseline::attention`, and the same written out in PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fuseline import native
from fuseline.ops.philox import multipliers

NONE, TOP_LEFT, BOTTOM_RIGHT = range(3)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GRADIENTS = ("q", "k", "v", "mask", "sinks")


@dataclass(frozen=True)
class Spec:
    """One call: q [B, H, T, D] and so on; mask_dims says which of b, h, t, s the mask has."""

    B: int = 2
    H: int = 2
    H_kv: int = 2
    T: int = 40
    S: int = 40
    D: int = 16
    dtype: torch.dtype = torch.float32
    causal: int = NONE
    window: tuple[int, int] = (-1, -1)
    mask: str = ""  # "", bool, same, float32
    mask_dims: str = "bhts"
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # packed sequences
    sinks: bool = False
    soft_cap: float = 0.0
    dropout_p: float = 0.0
    scale: float = 0.3
    layout: str = "bhtd"  # or bthd, or qkv: slices of one tensor
    seed: int = 0
    wanted: tuple[str, ...] = field(default=GRADIENTS)


@dataclass
class Inputs:
    spec: Spec
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    grad_out: torch.Tensor
    grad_lse: torch.Tensor

    def to(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Leaves of their own, floating ones as `dtype`."""
        made = {}
        for name, tensor in self.tensors.items():
            wide = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)
            made[name] = wide.clone().requires_grad_(name in self.spec.wanted and wide.is_floating_point())
        return made


def draw(spec: Spec, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(spec.seed)

    def normal(*shape: int, dtype: torch.dtype = spec.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    B, H, H_kv, T, S, D = spec.B, spec.H, spec.H_kv, spec.T, spec.S, spec.D
    options: dict[str, Any] = {"cu_seqlens_q": None, "cu_seqlens_k": None, "seed": None}
    longest_q, longest_k = T, S
    if spec.lengths is not None:
        for name, lengths in zip(("cu_seqlens_q", "cu_seqlens_k"), spec.lengths, strict=True):
            starts = torch.tensor([0, *lengths]).cumsum(0)
            options[name] = starts.to(device, torch.int32)
        longest_q, longest_k = max(spec.lengths[0]), max(spec.lengths[1])
    if spec.layout == "qkv":
        packed = normal(B, T, H + 2 * H_kv, D)
        q, k, v = (x.transpose(1, 2) for x in packed.split([H, H_kv, H_kv], 2))
    elif spec.layout == "bthd":
        q, k, v = (normal(B, n, h, D).transpose(1, 2) for n, h in ((T, H), (S, H_kv), (S, H_kv)))
    else:
        q, k, v = (normal(B, h, n, D) for n, h in ((T, H), (S, H_kv), (S, H_kv)))
    tensors = {"q": q, "k": k, "v": v}
    if spec.mask:
        shape = [
            size if name in spec.mask_dims else 1 for name, size in zip("bhts", (B, H, T, S), strict=True)
        ]
        if spec.mask == "bool":
            tensors["mask"] = normal(*shape, dtype=torch.float32) > -0.5
        else:
            mask = normal(*shape, dtype=torch.float32 if spec.mask == "float32" else spec.dtype)
            tensors["mask"] = mask.masked_fill(normal(*shape, dtype=torch.float32) > 1.5, -math.inf)
    if spec.sinks:
        tensors["sinks"] = normal(H, dtype=torch.float32)
    if spec.dropout_p > 0:
        options["seed"] = torch.tensor([spec.seed * 7919 + 12345678901], device=device)
    options |= {
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "causal": spec.causal,
        "window_left": spec.window[0],
        "window_right": spec.window[1],
        "softmax_scale": spec.scale,
        "soft_cap": spec.soft_cap,
        "dropout_p": spec.dropout_p,
    }
    return Inputs(
        spec, tensors, options, normal(B, T, H, D).transpose(1, 2), normal(B, H, T, dtype=torch.float32)
    )


def seen_keys(spec: Spec, device: torch.device) -> torch.Tensor:
    """[T, S]: which keys a row sees by causality, windows and packing, row by row as it is said."""
    seen = torch.zeros(spec.T, spec.S, dtype=torch.bool)
    lengths_q, lengths_k = spec.lengths or ((spec.T,), (spec.S,))
    first_t = first_s = 0
    for T, S in zip(lengths_q, lengths_k, strict=True):
        shift = S - T if spec.causal == BOTTOM_RIGHT else 0
        t, s = torch.arange(T)[:, None], torch.arange(S)
        block = torch.ones(T, S, dtype=torch.bool)
        if spec.causal != NONE or spec.window[1] >= 0:
            block &= s <= t + shift + (0 if spec.causal != NONE else spec.window[1])
        if spec.window[0] >= 0:
            block &= s >= t + shift - spec.window[0]
        seen[first_t : first_t + T, first_s : first_s + S] = block
        first_t, first_s = first_t + T, first_s + S
    return seen.to(device)


def written_out(inputs: Inputs, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in plain PyTorch, in the tensors' dtype."""
    spec, q, mask, sinks = inputs.spec, tensors["q"], tensors.get("mask"), tensors.get("sinks")
    k, v = (tensors[name].repeat_interleave(spec.H // spec.H_kv, 1) for name in "kv")
    y = q @ k.mT * spec.scale
    if spec.soft_cap > 0:
        y = spec.soft_cap * torch.tanh(y / spec.soft_cap)
    hidden = ~seen_keys(spec, q.device)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        y = y + mask
    hidden = (hidden | (y == -math.inf)).expand_as(y)
    y = y.masked_fill(hidden, -math.inf)
    if sinks is None:  # a column that no value belongs to, and that counts in no row that sees anything
        column = torch.where(hidden.all(-1, keepdim=True), 0.0, -math.inf).to(y.dtype)
    else:
        column = sinks[:, None, None].expand(*y.shape[:-1], 1)
    joined = torch.cat([y, column], -1)
    lse = torch.logsumexp(joined, -1)
    if sinks is None:
        lse = lse.masked_fill(hidden.all(-1), -math.inf)
    p = torch.softmax(joined, -1)[..., :-1]
    seed = inputs.options["seed"]
    if seed is not None:
        p = p * multipliers(seed, p.shape, spec.dropout_p).to(p.dtype)
    return p @ v, lse


def run_native(
    inputs: Inputs, tensors: dict[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The op's results and gradients. Without `tensors` they keep the layout they were drawn in."""
    if tensors is None:
        tensors = {
            name: x.detach().requires_grad_(name in inputs.spec.wanted and x.is_floating_point())
            for name, x in inputs.tensors.items()
        }
    out, lse = torch.ops.fuseline.attention(**tensors, **inputs.options)
    return results(inputs, tensors, out, lse)


def results(
    inputs: Inputs, tensors: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    leaves = {name: x for name, x in tensors.items() if x.requires_grad}
    finite = lse > -math.inf
    # -inf has no gradient to speak of
    total = (out * inputs.grad_out.to(out.dtype)).sum()
    total = total + (lse.masked_fill(~finite, 0.0) * inputs.grad_lse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if leaves else ()
    made = {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }
    return {"out": out.detach(), "lse": lse.detach()}, made


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative to the whole of it; infinities must agree."""
    x = x.double()
    assert torch.equal(x == -math.inf, exact == -math.inf)
    x, exact = x.masked_fill(x == -math.inf, 0.0), exact.masked_fill(exact == -math.inf, 0.0)
    return ((x - exact).norm() / exact.norm().clamp_min(1e-30)).item() if exact.numel() else 0.0


def check(spec: Spec, device: str) -> None:
    """Results and gradients: at most twice as far from float64 as plain PyTorch is, and one rounding more."""
    assert native.load()
    inputs = draw(spec, device)
    exact = inputs.to(torch.float64)
    plain = inputs.to(spec.dtype)
    exact_all = results(inputs, exact, *written_out(inputs, exact))
    plain_all = results(inputs, plain, *written_out(inputs, plain))
    native_all = run_native(inputs)
    # Differences of near equals, dp - delta, lose some bits of fp32 more.
    rounding = torch.finfo(spec.dtype).eps + 4 * torch.finfo(torch.float32).eps
    for kind in range(2):
        assert native_all[kind].keys() == exact_all[kind].keys()
        for name, truth in exact_all[kind].items():
            x = native_all[kind][name]
            size = math.sqrt(truth.numel() + 1)
            if truth.norm() < 1e-9 * size:  # zero but for rounding: masks that reach nothing
                assert x.double().norm() <= 1e-2 * size, (name, spec)
                continue
            found, bound = error(x, truth), 2 * error(plain_all[kind][name], truth) + rounding
            assert found <= bound, f"{name}: {found:.3g} where {bound:.3g} is allowed, {spec}"
