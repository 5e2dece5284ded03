"""Which candidate where nothing near was measured: an order of preference, which is a rule and says so.

The orders are those of measurements on an H100 (benchmarks/results): short rows belong to kernels that hold
whole problems on chip, longer ones in 16 bits to cuDNN and flash; a trained mask to what keeps memory linear.
"""

from __future__ import annotations

import functools

import torch

from fuseline.ops.attention.problem import Problem

SHORT = 128
FEW_QUERIES = 16
MOST_SCORES_ON_CPU = 2**26  # 128 MiB in 16 bits; the formula holds a few times that
_REST = ("fuseline", "efficient", "flash", "cudnn", "fa2", "math")


def order(problem: Problem, is_dynamic: bool = False) -> tuple[tuple[str, ...], str]:
    """Candidates from the first to try to the last, and why. With `is_dynamic` the shapes will vary: what
    prepares itself for each of them (cuDNN) comes late."""
    if problem.device.type == "cpu":
        return _on_cpu(problem)
    if problem.dtype.itemsize > 2:
        return _with_rest("efficient", "fuseline"), "over 16 bits, the memory-efficient kernel"
    if problem.mask == "float_grad":
        return _with_rest("fuseline", "efficient"), "a mask that wants its gradient, in linear memory"
    if problem.mask != "none":
        return _with_rest("efficient", "fuseline"), "with a mask, the memory-efficient kernel"
    if problem.sequences or problem.is_windowed or problem.seqlen_q <= FEW_QUERIES:
        return _with_rest("flash", "fa2", "fuseline"), "packed, windowed or few queries: flash"
    if is_dynamic:
        return _with_rest("flash", "fuseline"), "shapes that vary: flash, which prepares nothing for a shape"
    if max(problem.seqlen_q, problem.seqlen_k) < SHORT:
        return _with_rest("fuseline", "efficient", "cudnn"), "short rows: kernels that hold them on chip"
    return _with_rest("cudnn", "fa4", "flash"), "long rows in 16 bits: cuDNN, then flash"


def _on_cpu(problem: Problem) -> tuple[tuple[str, ...], str]:
    """By CPU time on one core of an EPYC with AVX512-BF16, lengths 8 to 1,024, torch 2.13. fp32: flash is the
    fastest or within 7% of it. bf16: the formula's products run in bf16, flash's in fp32: from length 32
    forward and 16 backward it takes 0.1 to 0.6 of flash's time. fp16: products are slow; the generic
    operator, which widens, takes 0.12 to 0.4 of flash's time backward, and 0.5 to 0.9 forward up to 64."""
    others = ("flash", "math", "fuseline", "plain")
    cells = problem.seqlen_q * problem.seqlen_k
    is_held = problem.batch * problem.heads * cells <= MOST_SCORES_ON_CPU
    if problem.dtype.itemsize > 2 or not is_held:
        return others, "on a CPU, torch's flash kernel where it serves"
    is_tiny = cells < (16**2 if problem.wants_grad else 32**2)
    if problem.dtype == torch.bfloat16 and _multiplies_bfloat16():
        # Flash skips what causality hides.
        if is_tiny or cells > (2**21 if problem.causal == "none" else 2**19):
            return others, "bf16 rows on a CPU, a few or long ones: torch's flash kernel"
        return ("plain", *others), "on a CPU that multiplies bf16: the formula, products in bf16"
    if problem.wants_grad or cells <= 64**2:
        return ("math", *others), "16 bits on a CPU that widens them: the generic operator, in fp32"
    return others, "16 bits on a CPU, forward: torch's flash kernel"


@functools.cache
def _multiplies_bfloat16() -> bool:
    asked = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return asked is not None and bool(asked())


def _with_rest(*first: str) -> tuple[str, ...]:
    return first + tuple(name for name in _REST if name not in first)
