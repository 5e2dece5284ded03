"""The attention candidates: what each one supports, and how each one is called.

torch's fused kernels are called as the operators that `scaled_dot_product_attention` would choose among, so
that a candidate is forced without a context manager: it costs nothing on the host and traces into one
graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from fuseline.errors import InputError, unknown_name
from fuseline.ops.softmax import softmax

HALF = (torch.float16, torch.bfloat16)
FLOATING = (torch.float32, torch.float64, *HALF)


@dataclass(frozen=True)
class Call:
    """One attention call, checked: q [B, H, T, D], k and v [B, H, S, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    softmax_scale: float
    dropout_p: float

    @property
    def is_square(self) -> bool:
        return self.q.shape[-2] == self.k.shape[-2]

    @property
    def wants_grad(self) -> bool:
        return torch.is_grad_enabled() and (
            self.q.requires_grad or self.k.requires_grad or self.v.requires_grad
        )

    def visible(self) -> torch.Tensor:
        """[T, S], True where query t may see key s: the last query sees every key."""
        T, S = self.q.shape[-2], self.k.shape[-2]
        return torch.ones(T, S, dtype=torch.bool, device=self.q.device).tril(S - T)


@dataclass(frozen=True)
class Backend:
    """A candidate: `run` computes it, `refuses` says why it cannot (None: it can)."""

    run: Callable[[Call], torch.Tensor]
    refuses: Callable[[torch.device, torch.dtype, int, float], str | None]


def supports(
    backend: str, device: torch.device | str, dtype: torch.dtype, head_dim: int, dropout_p: float = 0.0
) -> str | None:
    """None if `backend` runs on that device with that dtype and head dim; otherwise the reason why not."""
    if backend not in BACKENDS:
        raise unknown_name("attention backend", backend, BACKENDS)
    return BACKENDS[backend].refuses(torch.device(device), dtype, head_dim, dropout_p)


def _naive(call: Call) -> torch.Tensor:
    """As the paper writes it: scale after the product, a mask filled in, torch's softmax; T x S in memory."""
    scores = (call.q @ call.k.transpose(-2, -1)) * call.softmax_scale
    if call.causal:
        scores = scores.masked_fill(~call.visible(), -math.inf)
    weights = F.dropout(torch.softmax(scores, dim=-1), call.dropout_p)
    return weights @ call.v


def _naive_fused(call: Call) -> torch.Tensor:
    """The same with scale, mask and softmax in one pass over the scores."""
    scores = call.q @ call.k.transpose(-2, -1)
    weights = softmax(scores, scale=call.softmax_scale, causal=call.causal)
    return F.dropout(weights, call.dropout_p) @ call.v


def _auto(call: Call) -> torch.Tensor:
    mask = call.visible() if call.causal and not call.is_square else None
    return F.scaled_dot_product_attention(
        call.q,
        call.k,
        call.v,
        attn_mask=mask,
        dropout_p=call.dropout_p,
        is_causal=call.causal and mask is None,
        scale=call.softmax_scale,
    )


def _math(call: Call) -> torch.Tensor:
    q, k, v = _autocast(call)
    mask = None
    if (
        call.causal and not call.is_square
    ):  # this operator adds its mask, and would add a boolean one as 0 and 1
        mask = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~call.visible(), -math.inf)
    # Autocast would reach inside and widen the softmax alone, whose backward then meets two dtypes.
    with torch.autocast(q.device.type, enabled=False):
        return torch.ops.aten._scaled_dot_product_attention_math(
            q, k, v, mask, call.dropout_p, call.causal and mask is None, scale=call.softmax_scale
        )[0]


def _flash(call: Call) -> torch.Tensor:
    _need_square("flash", call)
    q, k, v = _autocast(call)
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, call.dropout_p, call.causal, scale=call.softmax_scale
        )[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, call.dropout_p, call.causal, scale=call.softmax_scale
    )[0]


def _efficient(call: Call) -> torch.Tensor:
    _need_square("efficient", call)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        *_autocast(call), None, call.wants_grad, call.dropout_p, call.causal, scale=call.softmax_scale
    )[0]


def _cudnn(call: Call) -> torch.Tensor:
    _need_square("cudnn", call)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        *_autocast(call), None, call.wants_grad, call.dropout_p, call.causal, scale=call.softmax_scale
    )[0]


def _autocast(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v cast as autocast casts scaled_dot_product_attention's; the operators are not on its list."""
    device = call.q.device.type
    if not torch.is_autocast_enabled(device) or call.q.dtype == torch.float64:
        return call.q, call.k, call.v
    dtype = torch.get_autocast_dtype(device)
    return call.q.to(dtype), call.k.to(dtype), call.v.to(dtype)


def _need_square(name: str, call: Call) -> None:
    if call.causal and not call.is_square:
        raise InputError(
            f"attention: {name} is causal only over as many keys as queries, but T={call.q.shape[-2]} and "
            f"S={call.k.shape[-2]}. Use backend='auto', 'math' or 'naive'."
        )


def _never(device: torch.device, dtype: torch.dtype, head_dim: int, dropout_p: float) -> str | None:
    return None if dtype in FLOATING else f"it takes floating dtypes, not {_name(dtype)}"


def _refuses_flash(device: torch.device, dtype: torch.dtype, head_dim: int, dropout_p: float) -> str | None:
    if device.type == "cpu":
        if dropout_p > 0:
            return "flash on a CPU has no dropout"
        return _never(device, dtype, head_dim, dropout_p)
    return _refuses_cuda("flash", device, dtype, HALF, head_dim, 256, (8, 0))


def _refuses_efficient(
    device: torch.device, dtype: torch.dtype, head_dim: int, dropout_p: float
) -> str | None:
    return _refuses_cuda("efficient", device, dtype, (torch.float32, *HALF), head_dim, None, (5, 0))


def _refuses_cudnn(device: torch.device, dtype: torch.dtype, head_dim: int, dropout_p: float) -> str | None:
    reason = _refuses_cuda("cudnn", device, dtype, HALF, head_dim, 128, (8, 0))
    if reason is None and not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    return reason


def _refuses_cuda(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    dtypes: tuple[torch.dtype, ...],
    head_dim: int,
    largest: int | None,
    capability: tuple[int, int],
) -> str | None:
    """What torch's fused CUDA kernels share: the device, dtypes, and head dims of whole 16-byte pieces."""
    if device.type != "cuda":
        return f"{name} is a CUDA kernel; the device is {device.type}"
    if dtype not in dtypes:
        return f"{name} takes {', '.join(map(_name, dtypes))}, not {_name(dtype)}"
    piece = 16 // dtype.itemsize
    if head_dim % piece:
        return f"{name} takes head dims that are multiples of {piece} at {_name(dtype)}, not {head_dim}"
    if largest is not None and head_dim > largest:
        return f"{name} takes head dims up to {largest}, not {head_dim}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < capability:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"{name} needs compute capability {capability[0]}.{capability[1]}; the GPU has {found}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


BACKENDS = {
    "naive": Backend(_naive, _never),
    "naive_fused": Backend(_naive_fused, _never),
    "math": Backend(_math, _never),
    "efficient": Backend(_efficient, _refuses_efficient),
    "flash": Backend(_flash, _refuses_flash),
    "cudnn": Backend(_cudnn, _refuses_cudnn),
    "auto": Backend(_auto, _never),
}
