"""One attention call: its tensors and options, checked and brought into one form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fuseline.errors import InputError, unknown_name
from fuseline.ops.attention.packing import check_starts
from fuseline.ops.attention.problem import CAUSAL, Problem
from fuseline.ops.autocast import autocast_dtype
from fuseline.ops.philox import check_probability

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
Window = int | tuple[int, int] | None


@dataclass(frozen=True)
class Call:
    """What a candidate runs.

    q: [B, H, T, D]; k, v: [B, Hkv, S, D] with H a multiple of Hkv; any strides.
    causal: "none", "top_left" (query t sees keys 0 .. t) or "bottom_right" (0 .. t + S - T: the last query
        sees all).
    window_left, window_right: query t sees keys from t + shift - window_left to t + shift + window_right,
        shift being S - T for "bottom_right" and 0 otherwise; -1 hides nothing. Causal makes the right one 0.
    mask: None, or 4 dimensions that broadcast to [B, H, T, S]: boolean (True is seen) or added to the scores.
    cu_seqlens_q, cu_seqlens_k: None, or int32 [sequences + 1], rising from 0: B is 1, and the rows of one
        sequence see each other alone. Limits count within a sequence, mask and dropout within the whole.
    soft_cap: 0, or c in c * tanh(score / c), before the mask.
    sinks: None, or fp32 [H]: a logit that takes part in each row's sum, with no value.
    seed: None, or one int64: dropout by ops/philox.py at flat positions of [B, H, T, S].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: str
    window_left: int
    window_right: int
    mask: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    soft_cap: float
    sinks: torch.Tensor | None
    dropout_p: float
    seed: torch.Tensor | None
    return_lse: bool

    @property
    def is_square(self) -> bool:
        return self.q.shape[-2] == self.k.shape[-2]

    def is_causal_alone(self) -> bool:
        """Whether keys 0 .. t are what query t sees, and nothing but the mask hides more."""
        if self.causal == "none" or self.window_left >= 0 or self.cu_seqlens_q is not None:
            return False
        # A branch, not the comparison: traced over lengths that vary, that would stay symbolic.
        if self.causal == "top_left" or self.is_square:  # noqa: SIM103
            return True
        return False

    def is_grouped(self) -> bool:
        """Whether several query heads share a key head."""
        if self.q.shape[1] != self.k.shape[1]:  # noqa: SIM103
            return True
        return False

    @property
    def wants_grad(self) -> bool:
        return torch.is_grad_enabled() and (
            self.q.requires_grad
            or self.k.requires_grad
            or self.v.requires_grad
            or (self.mask is not None and self.mask.requires_grad)
            or (self.sinks is not None and self.sinks.requires_grad)
        )

    @property
    def shift(self) -> int:
        """Where the diagonal stands: query t is level with key t + shift."""
        return self.k.shape[-2] - self.q.shape[-2] if self.causal == "bottom_right" else 0

    @property
    def reach_right(self) -> int:
        """How far to the right of its diagonal a query sees; -1 if there is no end."""
        return 0 if self.causal != "none" else self.window_right

    def limits(self) -> torch.Tensor | None:
        """[T, S], True where causality, windows and packing let query t see key s; None where all is seen."""
        T, S = self.q.shape[-2], self.k.shape[-2]
        device = self.q.device
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            sequence_T, t = _positions(self.cu_seqlens_q, T)
            sequence_S, s = _positions(self.cu_seqlens_k, S)
            if self.causal == "bottom_right":
                more_keys = self.cu_seqlens_k.diff() - self.cu_seqlens_q.diff()
                t = t + torch.cat([more_keys, more_keys.new_zeros(1)])[sequence_T]
            within = (sequence_T[:, None] == sequence_S) & (sequence_T[:, None] < len(self.cu_seqlens_q) - 1)
        else:
            if self.reach_right < 0 and self.window_left < 0:
                return None
            t, s = torch.arange(T, device=device) + self.shift, torch.arange(S, device=device)
            within = torch.ones(T, S, dtype=torch.bool, device=device)
        if self.reach_right >= 0:
            within = within & (s <= t[:, None] + self.reach_right)
        if self.window_left >= 0:
            within = within & (s >= t[:, None] - self.window_left)
        return within

    def may_be_blind(self) -> bool:
        """Whether a row may see nothing: by a mask or packing, which only their values tell, or surely, by
        limits."""
        if self.mask is not None or self.cu_seqlens_q is not None:
            return True
        T, S, right = self.q.shape[-2], self.k.shape[-2], self.reach_right
        if right >= 0 and self.shift + right < 0:  # the first row ends before the first key
            return True
        if self.window_left >= 0 and T - 1 + self.shift - self.window_left > S - 1:  # noqa: SIM103
            return True  # the last row begins behind the last key
        return False

    def problem(self) -> Problem:
        return Problem(*self.parts())

    def parts(self) -> tuple[Any, ...]:
        """The fields of `problem`, in order."""
        B, H, T, D = self.q.shape
        _, H_kv, S, _ = self.k.shape
        wants_grad = self.wants_grad
        mask, mask_dims = "none", ""
        if self.mask is not None:
            mask = "bool" if self.mask.dtype == torch.bool else "float"
            if mask == "float" and wants_grad and self.mask.requires_grad:
                mask = "float_grad"
            mask_dims = "".join(name for name, size in zip("bhts", self.mask.shape, strict=True) if size != 1)
        return (
            self.q.device,
            self.q.dtype,
            B,
            H,
            H_kv,
            T,
            S,
            D,
            "fwbw" if wants_grad else "fw",
            self.causal,
            self.window_left,
            self.window_right,
            mask,
            mask_dims,
            0 if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1,
            0 if self.cu_seqlens_q is None else self.max_seqlen_q,
            0 if self.cu_seqlens_q is None else self.max_seqlen_k,
            self.soft_cap > 0,
            self.sinks is not None,
            self.dropout_p,
            self.seed is not None,
            self.return_lse,
            torch.are_deterministic_algorithms_enabled(),
        )


def _positions(cu_seqlens: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the number of its sequence (behind the last: how many there are) and its place there."""
    row = torch.arange(rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return sequence, row - cu_seqlens[sequence]


def make_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    window: Window = None,
    mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Call:
    """A checked call, its tensors cast as autocast casts those of `scaled_dot_product_attention`."""
    _check_tensors(q, k, v)
    check_probability(dropout_p, "attention")
    if not 0 <= soft_cap < math.inf:
        raise InputError(
            f"attention: soft_cap={soft_cap} bounds no score. It is 0 (none) or a finite bound above 0."
        )
    if softmax_scale is not None and not -math.inf < softmax_scale < math.inf:
        raise InputError(
            f"attention: softmax_scale={softmax_scale} is not finite. Leave it out for 1 / sqrt(D)."
        )
    if causal is True:
        causal = "bottom_right"
    elif causal is False:
        causal = "none"
    elif causal not in CAUSAL:
        raise unknown_name("causal alignment", str(causal), CAUSAL)
    window_left, window_right = _window(window)
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_floating_point()):
        raise InputError(f"attention: sinks are one float a head, [{q.shape[1]}], not {_said(sinks)}.")
    if seed is not None and dropout_p > 0 and (seed.dtype != torch.int64 or seed.numel() != 1):
        raise InputError(f"attention: seed is one int64 on q's device, not {_said(seed)}.")
    for name, given in (
        ("mask", mask),
        ("sinks", sinks),
        ("seed", seed if dropout_p > 0 else None),
        ("cu_seqlens_q", cu_seqlens_q),
        ("cu_seqlens_k", cu_seqlens_k),
    ):
        if given is not None and given.device != q.device:
            raise InputError(f"attention: {name} is on {given.device} and q on {q.device}. Use one.")
    _check_packing(q, k, cu_seqlens_q, cu_seqlens_k)
    max_seqlen_q = q.shape[2] if max_seqlen_q is None else max_seqlen_q
    max_seqlen_k = k.shape[2] if max_seqlen_k is None else max_seqlen_k
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        check_starts("cu_seqlens_q", cu_seqlens_q, q.shape[2], max_seqlen_q)
        check_starts("cu_seqlens_k", cu_seqlens_k, k.shape[2], max_seqlen_k)
    if (dtype := autocast_dtype(q)) is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(max(q.shape[3], 1))
    elif softmax_scale <= 0:  # torch's flash kernels hide keys by -inf, and then scale that, too
        q, softmax_scale = (-q, -softmax_scale) if softmax_scale < 0 else (q * 0.0, 1.0)
    return Call(
        q=q,
        k=k,
        v=v,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        mask=None if mask is None else _mask(mask, q, k),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        soft_cap=float(soft_cap),
        sinks=None if sinks is None else sinks.float(),
        dropout_p=dropout_p,
        seed=seed if dropout_p > 0 else None,
        return_lse=return_lse,
    )


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if (
        q.dim() != 4
        or k.dim() != 4
        or k.shape != v.shape
        or q.shape[0] != k.shape[0]
        or q.shape[3] != k.shape[3]
    ):
        raise InputError(
            f"attention: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit. "
            "They are [B, H, T, D], [B, Hkv, S, D] and [B, Hkv, S, D]."
        )
    if q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise InputError(
            f"attention: {q.shape[1]} query heads do not divide among {k.shape[1]} key heads. "
            "H must be a multiple of Hkv."
        )
    if q.dtype != k.dtype or q.dtype != v.dtype or q.dtype not in FLOATING:
        raise InputError(
            f"attention: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}. "
            "They share one of float32, float16, bfloat16 and float64."
        )
    if q.device != k.device or q.device != v.device:
        raise InputError(f"attention: q, k and v are on {q.device}, {k.device} and {v.device}. Use one.")


def _window(window: Window) -> tuple[int, int]:
    if window is None:
        return -1, -1
    ends = window if isinstance(window, tuple | list) else (window, window)
    if len(ends) != 2 or not all(isinstance(end, int | torch.SymInt) for end in ends):
        raise InputError(
            f"attention: window={window!r} is neither a number of keys nor a pair (left, right)."
        )
    left, right = ends
    if left < -1 or right < -1:
        raise InputError(f"attention: window=({left}, {right}) has an end below -1. -1 means no end.")
    return left, right


def _check_packing(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None
) -> None:
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise InputError("attention: cu_seqlens_q and cu_seqlens_k come together; one of them is missing.")
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype != torch.int32:
            raise InputError(f"attention: {name} is int32 [sequences + 1], not {_said(cu_seqlens)}.")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise InputError(
            f"attention: cu_seqlens_q counts {cu_seqlens_q.shape[0] - 1} sequences and cu_seqlens_k "
            f"{cu_seqlens_k.shape[0] - 1}."
        )
    if q.shape[0] != 1:
        raise InputError(
            f"attention: packed sequences have a batch of 1, q has {q.shape[0]}: give q as [1, H, rows, D]."
        )


def _mask(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask in 4 dimensions."""
    B, H, T, S = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    fits = mask.dim() <= 4 and all(
        size in (1, full) for size, full in zip(reversed(mask.shape), (S, T, H, B), strict=False)
    )
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise InputError(
            f"attention: mask is {_said(mask)}, which is not boolean or floating and broadcast to "
            f"[B, H, T, S] = {[B, H, T, S]}."
        )
    for _ in range(4 - mask.dim()):
        mask = mask.unsqueeze(0)
    return mask


def _said(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
