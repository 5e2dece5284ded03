"""QuACK (Dao AI Lab): CuTe-DSL kernels for memory-bound ops. `pip install quack-kernels`.

Where it has several ways to one result, the fastest counts: `_fastest` times each of them once for a shape,
forward and backward. These are its cross-entropy in one pass, which writes the gradient forward as ours
does, and in two; and the chunks of its head. Its softmax has no scale, limit or mask: torch makes the
scores before it.

It tells its own functions from a library's by the folder's name: installed by `pip install --target`, it
imports only from a folder called `site-packages`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
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
from fuseline.bench.peers.plain import score_maker
from fuseline.ops import Op
from fuseline.ops.op import Outputs
from fuseline.ops.rope import rope_angles
from fuseline.timing import time_calls

Inputs = Mapping[str, Any]
Call = Callable[[], Outputs]
CHUNKS = (4096, 2048, 8192)  # rows of logits at a time; the first is quack's own default

_CHOSEN: dict[tuple[object, ...], str] = {}
"""The fastest of several ways, by op and shape."""


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
        refuse_options("quack", inputs, out_dtype=None)
        return _BINDERS[op.name](inputs)


def _matrix(inputs: Inputs, name: str = "x") -> torch.Tensor:
    x: torch.Tensor = inputs[name]
    if x.dim() != 2:
        raise UnsupportedError("quack takes matrices only")
    return x


def _softmax(inputs: Inputs) -> Call:
    refuse_options("quack", inputs, dim=-1)
    from quack.softmax import softmax

    x, mask, scores = inputs["x"], inputs.get("mask"), score_maker(inputs)
    return lambda: softmax(scores(x, mask).flatten(0, -2)).view(x.shape)


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
    two_passes = functools.partial(cross_entropy, logits, inputs["target"], **options)
    if not inputs.get("grad_in_forward") or options.get("reduction", "mean") == "none":
        return two_passes
    arguments = options.get("weight"), options.get("ignore_index", -100), options.get("reduction", "mean")
    one_pass = functools.partial(_OnePassCrossEntropy.apply, logits, inputs["target"], *arguments)
    return _fastest("cross_entropy", {"two passes": two_passes, "one pass": one_pass}, (logits,))


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
        # Of as many rows as hidden is wide it cannot tell the scales of rows from those of columns.
        ways = {
            f"chunks of {chunk}": functools.partial(call, chunk_size=chunk, tuned=True, **options)
            for chunk in CHUNKS
            if chunk != hidden.shape[1]
        }
        return _fastest("linear_cross_entropy", ways, (hidden, weight))
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


def _fastest(op: str, ways: Mapping[str, Call], leaves: tuple[torch.Tensor, ...]) -> Call:
    """The way that takes the least time, forward and backward, at the first call for a shape; without
    gradients the first of them. A way that fails is left out; if all do, the first raises its error later."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return next(iter(ways.values()))
    place = (op, *((leaf.shape, leaf.dtype) for leaf in leaves))
    if place not in _CHOSEN:
        times = {name: _time_both(way, wanted) for name, way in ways.items()}
        _CHOSEN[place] = min(times, key=lambda name: times[name])
    return ways[_CHOSEN[place]]


def _time_both(way: Call, leaves: Sequence[torch.Tensor]) -> float:
    """Microseconds of the forward and the backward of a scalar; infinite if it fails."""
    try:
        return time_calls(
            lambda: torch.autograd.grad(way(), leaves), leaves[0].device, repeats=5, warmup=2
        ).median
    except Exception:  # its compiler may raise anything, and the other ways still count
        return math.inf


class _OnePassCrossEntropy(torch.autograd.Function):
    """A mean or a sum by `cross_entropy_fwd(return_dx=True)`, which writes the gradient with the loss. The
    mean's divisor goes into the weights of the classes, which multiply both. The gradient of the loss itself
    is taken to be 1, as it is where the loss is the last thing computed."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        ignore_index: int,
        reduction: str,
    ) -> torch.Tensor:
        from quack.cross_entropy import cross_entropy_fwd

        factors = weight
        if reduction == "mean":
            kept = target != ignore_index
            ones = logits.new_ones(logits.shape[-1], dtype=torch.float32)
            of_classes = ones if weight is None else weight.float()
            total = kept.sum() if weight is None else (of_classes[target.clamp(min=0)] * kept).sum()
            factors = of_classes / total
        found = cross_entropy_fwd(
            logits, target, weight=factors, ignore_index=ignore_index, return_dx=ctx.needs_input_grad[0]
        )
        loss, ctx.grad = found if ctx.needs_input_grad[0] else (found, None)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        return ctx.grad, None, None, None, None


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
