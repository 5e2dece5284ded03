"""The C records of attention (csrc/kernels/fuseline_attention.h), through ctypes: the kernels alone.

Tensors are [B, H, T, D] views with unit stride in the last dimension; they are only memory here, and nothing
is checked.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from fuseline.native.kernels import DTYPES, MASK_ADD, MASK_ADD_FP32, MASK_BOOL, MASK_NONE, open_kernels

_POINTER, _INT, _SIZE, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
_THREE, _FOUR = _SIZE * 3, _SIZE * 4

CAUSAL = ("none", "top_left", "bottom_right")


class Record(ctypes.Structure):
    """`fuseline_attention`."""

    _fields_ = [
        *((name, _INT) for name in ("dtype", "causal")),
        *((name, _SIZE) for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim")),
        *((name, _POINTER) for name in ("q", "k", "v", "out", "lse")),
        *((name, _THREE) for name in ("q_strides", "k_strides", "v_strides", "out_strides")),
        *((name, _SIZE) for name in ("window_left", "window_right")),
        *((name, _DOUBLE) for name in ("softmax_scale", "soft_cap", "dropout")),
        ("seed", _POINTER),
        ("mask_kind", _INT),
        ("mask", _POINTER),
        ("mask_strides", _FOUR),
        *((name, _POINTER) for name in ("sinks", "cu_seqlens_q", "cu_seqlens_k")),
        *((name, _SIZE) for name in ("sequences", "max_seqlen_q", "max_seqlen_k")),
        ("workspace", _POINTER),
    ]


class GradientsRecord(ctypes.Structure):
    """`fuseline_attention_gradients`."""

    _fields_ = [
        ("call", Record),
        *((name, _POINTER) for name in ("grad_out", "grad_lse", "grad_q", "grad_k", "grad_v")),
        *(
            (name, _THREE)
            for name in ("grad_out_strides", "grad_q_strides", "grad_k_strides", "grad_v_strides")
        ),
        ("grad_mask", _POINTER),
        ("grad_mask_strides", _FOUR),
        ("grad_mask_dtype", _INT),
        *((name, _POINTER) for name in ("grad_sinks", "workspace")),
    ]


@dataclass(frozen=True)
class Options:
    """What a call says beside its tensors. `mask` broadcasts to [B, H, T, S]."""

    causal: str = "none"
    window_left: int = -1
    window_right: int = -1
    softmax_scale: float = 1.0
    mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    seed: torch.Tensor | None = None


def record(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> Record:
    call = Record()
    call.dtype, call.causal = DTYPES[q.dtype], CAUSAL.index(options.causal)
    call.batch, call.heads, call.seqlen_q, call.head_dim = q.shape
    call.kv_heads, call.seqlen_k = k.shape[1:3]
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        if tensor is not None:
            setattr(call, name, tensor.data_ptr())
            setattr(call, f"{name}_strides", _THREE(*tensor.stride()[:3]))
    call.lse = None if lse is None else lse.data_ptr()
    call.window_left, call.window_right = options.window_left, options.window_right
    call.softmax_scale, call.dropout = options.softmax_scale, options.dropout_p
    call.seed = None if options.seed is None else options.seed.data_ptr()
    call.mask_kind = MASK_NONE
    if options.mask is not None:
        same = options.mask.dtype == q.dtype
        call.mask_kind = (
            MASK_BOOL if options.mask.dtype == torch.bool else MASK_ADD if same else MASK_ADD_FP32
        )
        mask = options.mask.expand(*q.shape[:3], k.shape[2])
        call.mask, call.mask_strides = mask.data_ptr(), _FOUR(*mask.stride())
    call.workspace = None if workspace is None else workspace.data_ptr()
    return call


def gradients_record(
    call: Record,
    grad_out: torch.Tensor,
    grad_q: torch.Tensor | None,
    grad_k: torch.Tensor | None,
    grad_v: torch.Tensor | None,
    grad_lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> GradientsRecord:
    gradients = GradientsRecord()
    gradients.call = call
    tensors = (("grad_out", grad_out), ("grad_q", grad_q), ("grad_k", grad_k), ("grad_v", grad_v))
    for name, tensor in tensors:
        if tensor is not None:
            setattr(gradients, name, tensor.data_ptr())
            setattr(gradients, f"{name}_strides", _THREE(*tensor.stride()[:3]))
    gradients.grad_lse = None if grad_lse is None else grad_lse.data_ptr()
    gradients.workspace = None if workspace is None else workspace.data_ptr()
    return gradients


class DecodeRecord(ctypes.Structure):
    """`fuseline_decode`."""

    _fields_ = [
        *(
            (name, _POINTER)
            for name in ("qkv", "y", "k", "v", "k_scales", "v_scales", "lengths", "cos", "sin")
        ),
        *((name, _POINTER) for name in ("q_norm", "k_norm", "partials", "arrivals")),
        *((name, _SIZE) for name in ("batch", "heads", "kv_heads", "head_dim", "count", "qkv_stride")),
        *(
            (name, _SIZE)
            for name in ("batch_stride", "head_stride", "scale_batch_stride", "scale_head_stride")
        ),
        ("window", _SIZE),
        *((name, _DOUBLE) for name in ("eps", "scale")),
        *((name, _INT) for name in ("dtype", "cache", "overlap")),
    ]


class Plan(ctypes.Structure):
    """`fuseline_attention_plan`."""

    class Launch(ctypes.Structure):
        _fields_ = [
            ("kernel", ctypes.c_char_p),
            ("blocks", _SIZE),
            ("threads", _INT),
            ("shared", ctypes.c_size_t),
        ]

    _fields_ = [
        ("code", _INT),
        ("reason", ctypes.c_char_p),
        ("workspace", ctypes.c_size_t),
        ("count", _INT),
        ("launches", Launch * 8),
    ]


@dataclass(frozen=True)
class Attention:
    """The attention kernels. Each call answers 0, or what it could not do."""

    library: ctypes.CDLL

    def plan(self, gradients: GradientsRecord, backward: bool) -> Plan:
        plan = Plan()
        given = ctypes.byref(gradients), int(backward), ctypes.byref(plan)
        assert self.library.fuseline_attention_explain(*given) == 0
        return plan

    def is_short(self, call: Record, backward: bool) -> bool:
        """Whether kernels of short sequences take the call; `backward`: and all of its gradients."""
        gradients = GradientsRecord()
        gradients.call = call
        for name in ("q", "k", "v"):
            setattr(gradients, f"grad_{name}", getattr(call, name))
            setattr(gradients, f"grad_{name}_strides", getattr(call, f"{name}_strides"))
        plan = self.plan(gradients, backward)
        return plan.count > 0 and plan.launches[0].kernel.startswith(b"short_")

    def workspace(self, gradients: GradientsRecord, backward: bool) -> int:
        return self.plan(gradients, backward).workspace

    def forward(self, call: Record) -> int:
        return self.library.fuseline_attention_forward(ctypes.byref(call), _stream())

    def backward(self, gradients: GradientsRecord) -> int:
        return self.library.fuseline_attention_backward(ctypes.byref(gradients), _stream())


def open_attention() -> Attention:
    library = open_kernels().library
    library.fuseline_attention_explain.argtypes = [_POINTER, _INT, _POINTER]
    library.fuseline_attention_forward.argtypes = [_POINTER, _POINTER]
    library.fuseline_attention_backward.argtypes = [_POINTER, _POINTER]
    return Attention(library)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
