"""The rungs, as data: which lever each pulls, what it changes, and where it cannot stand.

A rung replaces what its slot holds. Slots are climbed in the order they are listed in: what decides the cost
of everything else (the number format) first, what wraps everything else (execution) last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fuseline.acceleration.precision import compute_dtype
from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.spec import RunSpec, Spec
from fuseline.ops import attention_backends

SLOTS = ("precision", "attention", "vocabulary", "loss", "optimizer", "kernels", "execution")

LEVERS = {
    "fuse": "fewer, larger kernels, so that less goes through memory",
    "tensor cores": "matrix products in formats and sizes that the matrix units like",
    "overhead": "less time on the host between kernels",
    "quantize": "fewer bits for each weight",
    "custom kernels": "kernels written for the one thing that has to be done",
}

NO_LEVER = "none"  # plain PyTorch: where the ladder stands on the ground

Unavailable = Callable[[Machine, Any], "str | None"]


@dataclass(frozen=True)
class Rung:
    """`change` is what the rung sets in a `RunSpec`; `unavailable(machine, spec)` is why it cannot run there
    or would not pay, None where it can. `needs` is what of other slots it cannot do without: what it is
    compared with gets that, too, so that the gain is its own. `named_on`: kinds of device on which it is
    climbed only where it is named."""

    name: str
    slot: str
    lever: str
    summary: str
    change: Mapping[str, Any]
    unavailable: Unavailable
    needs: Mapping[str, Any] = field(default_factory=dict)
    named_on: tuple[str, ...] = ()


def _always(machine: Machine, spec: RunSpec) -> str | None:
    return None


def _tf32(machine: Machine, spec: RunSpec) -> str | None:
    if machine.capability is None:
        return "TF32 is a format of CUDA tensor cores"
    return None if machine.capability >= (8, 0) else f"{machine.label} has no TF32 (compute 8.0 and later do)"


def _bf16(machine: Machine, spec: RunSpec) -> str | None:
    if machine.bf16:
        return None
    if machine.is_cuda:
        return f"{machine.label} has no bf16 tensor cores (compute 8.0 and later do)"
    return "would not pay: this CPU has neither AMX nor AVX512-BF16"


def _fp16(machine: Machine, spec: RunSpec) -> str | None:
    if machine.fp16:
        return None
    return f"would not pay: {machine.label} has no fast fp16 matrix products in torch"


def _fp8(machine: Machine, spec: RunSpec) -> str | None:
    if machine.capability is None:
        return "fp8 is a format of CUDA tensor cores"
    return None if machine.capability >= (8, 9) else f"{machine.label} has no fp8 (compute 8.9 and later do)"


def _attention(machine: Machine, spec: RunSpec) -> str | None:
    if spec.attention == "naive_fused" and machine.native_missing:
        return machine.native_missing
    return attention_backends.supports(
        spec.attention,
        torch.device(machine.device),
        compute_dtype(spec.precision),
        spec.config.head_dim,
        spec.dropout,
    )


def _padded(machine: Machine, spec: RunSpec) -> str | None:
    multiple = spec.vocab_multiple
    if spec.vocab_size % multiple == 0:
        return f"nothing to pad: {spec.vocab_size} is a multiple of {multiple} already"
    return None


def _narrow_loss(machine: Machine, spec: RunSpec) -> str | None:
    if spec.loss == "float32" or compute_dtype(spec.precision).itemsize == 2:
        return None
    return f"nothing to narrow: the logits are fp32 ({spec.precision})"


def _native(machine: Machine, spec: RunSpec) -> str | None:
    return machine.native_missing


def _graphs(machine: Machine, spec: RunSpec) -> str | None:
    return None if machine.is_cuda else "CUDA graphs need a CUDA device"


def _inductor(machine: Machine, spec: RunSpec) -> str | None:
    return machine.compiler_missing


def _inductor_graphs(machine: Machine, spec: RunSpec) -> str | None:
    return _graphs(machine, spec) or machine.compiler_missing


RUNGS: tuple[Rung, ...] = (
    Rung("fp32", "precision", NO_LEVER, "every product in fp32", {"precision": "fp32"}, _always),
    Rung("tf32", "precision", "tensor cores", "fp32 with products in TF32", {"precision": "tf32"}, _tf32),
    Rung("bf16", "precision", "tensor cores", "autocast to bf16", {"precision": "bf16"}, _bf16),
    Rung(
        "fp16",
        "precision",
        "tensor cores",
        "autocast to fp16 with a gradient scaler, which takes the fused AdamW",
        {"precision": "fp16", "optimizer": "fused"},
        _fp16,
        needs={"optimizer": "fused"},
    ),
    Rung(
        "fp8",
        "precision",
        "tensor cores",
        "bf16, and the blocks' linear layers in fp8 where that is faster: e4m3, a scale for each row",
        {"precision": "fp8"},
        _fp8,
    ),
    Rung(
        "naive",
        "attention",
        NO_LEVER,
        "product, scale, mask, softmax, product: five passes over [T, T]",
        {"attention": "naive"},
        _attention,
    ),
    Rung(
        "fused-softmax",
        "attention",
        "custom kernels",
        "naive, with scale, mask and softmax in one kernel of Fuseline's",
        {"attention": "naive_fused"},
        _attention,
    ),
    Rung(
        "math",
        "attention",
        "fuse",
        "SDPA's generic kernel",
        {"attention": "math"},
        _attention,
        named_on=("cpu",),  # `flash` does the same there without writing [T, T]
    ),
    Rung(
        "efficient",
        "attention",
        "fuse",
        "SDPA's memory-efficient kernel: [T, T] is never written",
        {"attention": "efficient"},
        _attention,
    ),
    Rung("flash", "attention", "fuse", "SDPA's FlashAttention", {"attention": "flash"}, _attention),
    Rung("cudnn", "attention", "fuse", "SDPA's cuDNN kernel", {"attention": "cudnn"}, _attention),
    Rung(
        "auto",
        "attention",
        "fuse",
        "SDPA as torch picks",
        {"attention": "auto"},
        _attention,
        named_on=("cpu",),  # there it is `flash`
    ),
    Rung("flex", "attention", "fuse", "FlexAttention, compiled", {"attention": "flex"}, _attention),
    Rung("fa2", "attention", "fuse", "the flash-attn package", {"attention": "fa2"}, _attention),
    Rung("fa4", "attention", "fuse", "the flash-attn-4 package", {"attention": "fa4"}, _attention),
    Rung(
        "fuseline-attention",
        "attention",
        "custom kernels",
        "Fuseline's own attention kernels",
        {"attention": "fuseline"},
        _attention,
        named_on=("cpu",),  # there it is what kernels are compared with, and torch's are faster
    ),
    Rung(
        "pick",
        "attention",
        "fuse",
        "the fastest as measured",
        {"attention": "pick"},
        _attention,
        named_on=("cpu",),  # there it is `flash`
    ),
    Rung(
        "exact-vocabulary",
        "vocabulary",
        NO_LEVER,
        "a head with as many rows as there are tokens",
        {"vocab_multiple": 1},
        _always,
    ),
    Rung(
        "padded-vocabulary",
        "vocabulary",
        "tensor cores",
        "the head's rows padded to a multiple of 64",
        {"vocab_multiple": 64},
        _padded,
    ),
    Rung(
        "fp32-loss",
        "loss",
        NO_LEVER,
        "log-probabilities in fp32, whatever the logits are",
        {"loss": "float32"},
        _always,
    ),
    Rung(
        "16-bit-loss",
        "loss",
        "fuse",
        "log-probabilities in the logits' 16 bits, as nanoGPT has them: the largest tensor is never widened",
        {"loss": "logits"},
        _narrow_loss,
    ),
    Rung(
        "fused-loss",
        "loss",
        "custom kernels",
        "Fuseline's cross-entropy: fp32 in registers, the gradient written over the logits in the same pass",
        {"loss": "fuseline"},
        _native,
    ),
    Rung(
        "linear-loss",
        "loss",
        "custom kernels",
        "the head and Fuseline's cross-entropy by chunks of rows: the logits never exist as a whole",
        {"loss": "fuseline-linear"},
        _native,
        named_on=("cpu",),  # what it saves is memory, which is not measured there
    ),
    Rung(
        "unfused-adamw",
        "optimizer",
        NO_LEVER,
        "AdamW operation by operation",
        {"optimizer": "unfused"},
        _always,
    ),
    Rung("fused-adamw", "optimizer", "fuse", "AdamW in one kernel", {"optimizer": "fused"}, _always),
    Rung("torch-kernels", "kernels", NO_LEVER, "torch's LayerNorm", {"kernels": "torch"}, _always),
    Rung(
        "fuseline-kernels",
        "kernels",
        "custom kernels",
        "Fuseline's LayerNorm, in one pass with the sum before it, and the MLP's bias in the GELU",
        {"kernels": "fuseline"},
        _native,
        named_on=("cpu",),  # behind torch's there when it was tried
    ),
    Rung("eager", "execution", NO_LEVER, "operation by operation", {"execution": "eager"}, _always),
    Rung(
        "cudagraphs",
        "execution",
        "overhead",
        "torch.compile(backend='cudagraphs'): eager kernels, replayed",
        {"execution": "cudagraphs"},
        _graphs,
    ),
    Rung(
        "inductor",
        "execution",
        "fuse",
        "torch.compile: pointwise work and reductions fused",
        {"execution": "inductor"},
        _inductor,
    ),
    Rung(
        "reduce-overhead",
        "execution",
        "overhead",
        "torch.compile(mode='reduce-overhead'): fused, and replayed as CUDA graphs",
        {"execution": "reduce-overhead"},
        _inductor_graphs,
    ),
    Rung(
        "graph",
        "execution",
        "overhead",
        "one CUDA graph around the whole eager step, optimizer included",
        {"execution": "graph"},
        _graphs,
    ),
    Rung(
        "inductor-graph",
        "execution",
        "overhead",
        "one CUDA graph around the whole compiled step, optimizer included",
        {"execution": "inductor-graph"},
        _inductor_graphs,
    ),
)


def find_rung(name: str) -> Rung | None:
    return next((rung for rung in RUNGS if rung.name == name), None)


def why_not(spec: Spec, machine: Machine, rungs: Sequence[Rung] = RUNGS) -> str | None:
    """Why `spec` cannot run on `machine` or would not pay there, by the first of its `rungs` that says so."""
    for rung in rungs:
        if spec.with_(rung.change) == spec:
            reason = rung.unavailable(machine, spec)
            if reason:
                return f"{rung.name}: {reason}"
    return None
