"""QuACK (Dao AI Lab): CuTe-DSL kernels for memory-bound ops. `pip install quack-kernels`.

It tells its own functions from a library's by the folder's name: installed by `pip install --target`, it
imports only from a folder called `site-packages`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuseline.bench.peers.peer import (
    WHOLE_HEADS,
    UnsupportedError,
    norm_eps,
    package_version,
    refuse_options,
    why_not_importable,
)
from fuseline.ops import Op
from fuseline.ops.op import Outputs
from fuseline.ops.rope import rope_angles

Inputs = Mapping[str, Any]
Call = Callable[[], Outputs]
CHUNK = 4096  # rows of logits at a time, quack's own default


class Quack:
    name = "quack"
    overwrites = False
    compiles = True

    def why_not(self, device: torch.device) -> str | None:
        return why_not_importable("quack", "quack-kernels", device)

    def version(self) -> str:
        return package_version("quack-kernels")

    def bind(self, op: Op, inputs: Inputs) -> Call:
        if op.name not in _BINDERS:
            raise UnsupportedError(f"quack has no {op.name}")
        return _BINDERS[op.name](inputs)


def _matrix(inputs: Inputs, name: str = "x") -> torch.Tensor:
    x: torch.Tensor = inputs[name]
    if x.dim() != 2:
        raise UnsupportedError("quack takes matrices only")
    return x


def _softmax(inputs: Inputs) -> Call:
    x = _matrix(inputs)
    refuse_options("quack", inputs, dim=-1, scale=1.0, causal=False, mask=None)
    from quack.softmax import softmax

    return functools.partial(softmax, x)


def _layer_norm(inputs: Inputs) -> Call:
    x, weight, bias = _matrix(inputs), inputs.get("weight"), inputs.get("bias")
    if weight is None or bias is None:
        raise UnsupportedError("quack's LayerNorm is adapted with a weight and a bias only")
    in_fp32 = weight.detach().float(), bias.detach().float()
    return functools.partial(_LayerNorm.apply, x, weight, bias, *in_fp32, inputs.get("eps", 1e-5))


def _rms_norm(inputs: Inputs) -> Call:
    x = _matrix(inputs)
    refuse_options("quack", inputs, residual=None)
    from quack.rmsnorm import rmsnorm

    return functools.partial(rmsnorm, x, inputs.get("weight"), eps=norm_eps(inputs))


def _add_rms_norm(inputs: Inputs) -> Call:
    x = _matrix(inputs)
    from quack.rmsnorm import rmsnorm

    options = {"residual": inputs["residual"], "eps": norm_eps(inputs), "prenorm": True}
    return functools.partial(rmsnorm, x, inputs.get("weight"), **options)


def _cross_entropy(inputs: Inputs) -> Call:
    logits = _matrix(inputs, "logits")
    refuse_options("quack", inputs, label_smoothing=0.0, soft_cap=None, z_loss=0.0, vocab_size=None)
    from quack.cross_entropy import cross_entropy

    options = {name: inputs[name] for name in ("weight", "ignore_index", "reduction") if name in inputs}
    return functools.partial(cross_entropy, logits, inputs["target"], **options)


def _linear_cross_entropy(inputs: Inputs) -> Call:
    hidden, weight, target = _matrix(inputs, "hidden"), inputs["weight"], inputs["target"]
    refuse_options(
        "quack", inputs, class_weight=None, label_smoothing=0.0, soft_cap=None, z_loss=0.0, vocab_size=None
    )
    from quack import linear_cross_entropy as quack_loss

    options = {name: inputs[name] for name in ("ignore_index", "reduction") if name in inputs}
    # What its own module asks for before it goes by chunks.
    in_chunks = inputs.get("bias") is None and all(size % 8 == 0 for size in (*hidden.shape, *weight.shape))
    if in_chunks and options.get("reduction", "mean") != "none":
        call = functools.partial(quack_loss.chunked_linear_cross_entropy, hidden, weight, target)
        return functools.partial(call, chunk_size=CHUNK, tuned=False, **options)
    whole = quack_loss.linear_cross_entropy_func
    return functools.partial(whole, hidden, weight, inputs.get("bias"), target, **options)


def _rope(inputs: Inputs) -> Call:
    """[B, H, T, D] seen as its [B, T, H, D]: it reads and writes through strides."""
    x = inputs["x"]
    refuse_options("quack", inputs, **WHOLE_HEADS)
    if x.dim() != 4 or x.shape[-1] % 8:
        raise UnsupportedError("quack turns [B, T, H, D] with D a multiple of 8")
    from quack.rotary import apply_rotary_emb

    angles = rope_angles(torch.arange(x.shape[-2], device=x.device), x.shape[-1], inputs.get("base", 10000.0))
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return lambda: apply_rotary_emb(x.transpose(1, 2), cos, sin).transpose(1, 2)


class _LayerNorm(torch.autograd.Function):
    """quack's two LayerNorm functions, joined; they want weight and bias in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        weight_fp32: torch.Tensor,
        bias_fp32: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        from quack.rmsnorm import layernorm_fwd

        y, rstd, mean = layernorm_fwd(x, weight_fp32, bias_fp32, eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, weight_fp32, rstd, mean)
        ctx.dtypes = weight.dtype, bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        try:
            from quack.rmsnorm import layernorm_bwd
        except ImportError as error:
            raise UnsupportedError("this version of quack has no LayerNorm backward") from error
        x, weight_fp32, rstd, mean = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = layernorm_bwd(x, weight_fp32, grad_out, rstd, mean)
        return grad_x, grad_weight.to(ctx.dtypes[0]), grad_bias.to(ctx.dtypes[1]), None, None, None


_BINDERS: Mapping[str, Callable[[Inputs], Call]] = {
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "rope": _rope,
}
