"""Which candidate where nothing near was measured: an order of preference, which is a rule and says so.

The orders are those of measurements on an H100 (benchmarks/results): short rows belong to kernels that hold
whole problems on chip, longer ones in 16 bits to cuDNN and flash; a trained mask to what keeps memory linear.
"""

from __future__ import annotations

from fuseline.ops.attention.problem import Problem

SHORT = 128
FEW_QUERIES = 16
_REST = ("fuseline", "efficient", "flash", "cudnn", "fa2", "math")


def order(problem: Problem, is_dynamic: bool = False) -> tuple[tuple[str, ...], str]:
    """Candidates from the first to try to the last, and why. With `is_dynamic` the shapes will vary: what
    prepares itself for each of them (cuDNN) comes late."""
    if problem.device.type == "cpu":
        return ("flash", "math", "fuseline"), "on a CPU, torch's flash kernel where it serves"
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


def _with_rest(*first: str) -> tuple[str, ...]:
    return first + tuple(name for name in _REST if name not in first)
