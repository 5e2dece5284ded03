"""`flex`: FlexAttention: every feature but dropout and packing, from a kernel compiled for each shape.

The scores' changes are written as a function that torch.compile turns into a Triton kernel; causal limits and
windows are given as a map of blocks, so that hidden ones are skipped. Sinks enter by the lse: they scale a
row's output by 1 / (1 + exp(sink - lse)). Source: Dong et al., "Flex Attention", 2024.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import HALF, Attended, Candidate, UnfitError, refuse_cuda, refuse_extras
from fuseline.ops.attention.problem import Problem

_BLOCK = 128
_LARGEST_GRID = 65535
_DECODED_ROWS = 16  # with more, its kernel for decoding may find no configuration
_built: set[tuple[Any, ...]] = set()  # the signatures whose kernels were compiled and fit
_Limits = tuple[int, int, int, int, int]  # T, S, shift, window_left, reach_right


def _supports(problem: Problem) -> str | None:
    reason = refuse_cuda(problem, (torch.float32, *HALF), None)
    reason = reason or refuse_extras(problem, "dropout", "packing")
    if reason is None and problem.head_dim < 16:
        return f"it takes head dims from 16, not {problem.head_dim}"
    if reason is None and problem.batch * problem.heads > _LARGEST_GRID:
        return f"it takes batch times heads up to {_LARGEST_GRID}"
    return reason


def _varies(problem: Problem) -> str | None:
    return "it adds up the mask's gradient atomically" if problem.mask == "float_grad" else None


def _run(call: Call) -> Attended:
    limits = _limits(call)
    if torch.compiler.is_compiling():
        return attend(call, None if limits is None else block_map(limits, call.q.device), flex_attention)
    blocks = None if limits is None else _cached_block_map(limits, call.q.device)
    signature = _signature(call)
    if signature in _built:
        return attend(call, blocks, _compiled(signature))
    # Both directions are compiled here: the backward would otherwise fail where nobody can choose again.
    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        try:
            attended = attend(call, blocks, _compiled(signature))
        except RuntimeError as error:
            if not _lacks_room(error):
                raise
            raise UnfitError("its kernel needs more shared memory than the GPU has") from error
    _built.add(signature)
    return attended


def _lacks_room(error: BaseException) -> bool:
    """Whether none of the kernel's configurations fit in shared memory: triton says so, inductor wraps it."""
    words = ("out of resource", "OutOfResources", "No valid triton configs")
    causes = (error, error.__cause__, error.__context__)
    return any(word in str(each) for each in causes if each is not None for word in words)


def attend(call: Call, blocks: BlockMask | None, function: Callable[..., Any]) -> Attended:
    """The call by `function`, which is `flex_attention` or compiled from it."""
    mask, sinks = call.mask, call.sinks
    dims = () if mask is None else tuple(i for i, size in enumerate(mask.shape) if size != 1)
    if mask is not None:
        mask = mask.reshape([mask.shape[i] for i in dims])
    wants_lse = call.return_lse or sinks is not None
    out, lse = _modified(
        call.q, call.k, call.v, mask, dims, call.soft_cap, call.softmax_scale, blocks, wants_lse, function
    )
    if sinks is not None:
        sink = sinks[:, None]
        out = (out * torch.sigmoid(lse - sink)[..., None]).to(out.dtype)
        lse = torch.logaddexp(lse, sink)
    return out, lse if call.return_lse else None


def _modified(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dims: tuple[int, ...],
    soft_cap: float,
    scale: float,
    blocks: BlockMask | None,
    wants_lse: bool,
    function: Callable[..., Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    if function is not flex_attention:
        return function(q, k, v, mask, dims, soft_cap, scale, blocks, wants_lse)
    return _flex(q, k, v, mask, dims, soft_cap, scale, blocks, wants_lse)


def _flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dims: tuple[int, ...],
    soft_cap: float,
    scale: float,
    blocks: BlockMask | None,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse); everything is an argument, so that a compiled one has nothing to guard but shapes."""

    def changed(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, s: torch.Tensor
    ) -> torch.Tensor:
        if soft_cap > 0:
            score = soft_cap * torch.tanh(score / soft_cap)
        if mask is not None:
            place = (b, h, t, s)
            at = mask[tuple(place[i] for i in dims)]
            score = torch.where(at, score, -math.inf) if mask.dtype == torch.bool else score + at
        return score

    groups = q.shape[1] // k.shape[1]
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=changed if soft_cap > 0 or mask is not None else None,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True} if q.shape[2] * groups > _DECODED_ROWS else None,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse  # type: ignore[return-value]  # it was asked for


def _signature(call: Call) -> tuple[Any, ...]:
    """What a kernel is compiled for."""
    tensors = (call.q, call.k, call.v, call.mask)
    shapes = tuple(
        None if x is None else (x.shape, x.stride(), x.dtype, x.requires_grad, x.device) for x in tensors
    )
    return (*shapes, call.soft_cap, call.softmax_scale, _limits(call), torch.is_grad_enabled())


@functools.cache
def _compiled(signature: tuple[Any, ...]) -> Callable[..., Any]:
    """A compiled `_flex` for that signature alone: under a code object of its own, or the shapes of all calls
    would count against torch's limit of recompilations."""
    code = _flex.__code__.replace(co_name=f"_flex_{abs(hash(signature))}")
    own = types.FunctionType(code, _flex.__globals__, code.co_name, _flex.__defaults__, _flex.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def _limits(call: Call) -> _Limits | None:
    if call.reach_right < 0 and call.window_left < 0:
        return None
    return call.q.shape[2], call.k.shape[2], call.shift, call.window_left, call.reach_right


@functools.lru_cache(maxsize=64)
def _cached_block_map(limits: _Limits, device: torch.device) -> BlockMask:
    return block_map(limits, device)


def block_map(limits: _Limits, device: torch.device) -> BlockMask:
    """Which blocks of 128 queries and 128 keys are seen in part and which in full, by arithmetic on their
    corners: nothing of the size T x S is formed."""
    T, S, shift, left, right = limits
    first_t = torch.arange(0, T, _BLOCK, device=device)[:, None] + shift
    first_s = torch.arange(0, S, _BLOCK, device=device)
    is_whole = (first_t - shift + _BLOCK <= T) & (first_s + _BLOCK <= S)
    last_t, last_s = (first_t + _BLOCK - 1).clamp(max=T - 1 + shift), (first_s + _BLOCK - 1).clamp(max=S - 1)
    touched = torch.ones(first_t.shape[0], first_s.shape[0], dtype=torch.bool, device=device)
    full = is_whole
    if right >= 0:
        touched = touched & (first_s <= last_t + right)
        full = full & (last_s <= first_t + right)
    if left >= 0:
        touched = touched & (last_s >= first_t - left)
        full = full & (first_s >= last_t - left)

    def seen(b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        within = (s <= t + (shift + right)) if right >= 0 else (s >= 0)
        return within & (s >= t + (shift - left)) if left >= 0 else within

    partial_count, partial_index = _ordered(touched & ~full)
    full_count, full_index = _ordered(full)
    return BlockMask.from_kv_blocks(
        partial_count, partial_index, full_count, full_index, _BLOCK, seen, seq_lengths=(T, S)
    )


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, 1, rows] counts and [1, 1, rows, columns] column indices, those of set blocks first."""
    count = blocks.sum(-1, dtype=torch.int32)
    index = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None].contiguous(), index[None, None].contiguous()


CANDIDATE = Candidate("flex", "FlexAttention, compiled", _supports, _run, varies=_varies, compiles=True)
