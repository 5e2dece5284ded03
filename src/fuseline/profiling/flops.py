"""The FLOPs of products of matrices and of attention, from the sizes of their arguments.

A product of [m, k] and [k, n] is 2 m k n. Attention is two products forward and five backward; of a causal
square only the half that is looked at counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Shapes = Mapping[str, Sequence[Sequence[int]]]
"""The sizes of each tensor argument, a list of one or more by the argument's name."""
Formula = Callable[[Shapes, Mapping[str, Any]], float]


def flops_of(name: str, shapes: Shapes, values: Mapping[str, Any]) -> float:
    """0 for ops that are neither products nor attention."""
    formula = FORMULAS.get(name)
    if formula is None:
        return 0.0
    try:
        return formula(shapes, values)
    except (KeyError, IndexError, ValueError):
        return 0.0  # a form of the op whose arguments have other names


def _first(shapes: Shapes, *names: str) -> Sequence[int]:
    """The sizes of the first of these arguments that is there."""
    for name in names:
        found = shapes.get(name) or []
        if found:
            return found[0]
    raise KeyError(names[0])


def _product(left: str, right: str) -> Formula:
    """[.., m, k] x [.., k, n]."""

    def flops(shapes: Shapes, values: Mapping[str, Any]) -> float:
        a, b = _first(shapes, left), _first(shapes, right)
        return 2.0 * math.prod(a) * b[-1]

    return flops


def _linear(shapes: Shapes, values: Mapping[str, Any]) -> float:
    """[.., k] with a weight [n, k]."""
    return 2.0 * math.prod(_first(shapes, "input", "x", "self")) * _first(shapes, "weight")[0]


def _convolution(shapes: Shapes, values: Mapping[str, Any]) -> float:
    """Each place of the output is a product of the weight [out, in / groups, ...] and the input under it."""
    x, weight = _first(shapes, "input", "self"), _first(shapes, "weight")
    stride = values.get("stride") or [1] * (len(x) - 2)
    padding = values.get("padding") or [0] * (len(x) - 2)
    dilation = values.get("dilation") or [1] * (len(x) - 2)
    places = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
    return 2.0 * x[0] * math.prod(places) * math.prod(weight)


def _convolution_backward(shapes: Shapes, values: Mapping[str, Any]) -> float:
    """The FLOPs of the forward, once for each gradient (of input and weight) that is wanted."""
    grad, weight = _first(shapes, "grad_output"), _first(shapes, "weight")
    wanted = values.get("output_mask") or [True] * 3
    each = 2.0 * math.prod(grad) / grad[1] * math.prod(weight)
    return each * (bool(wanted[0]) + bool(wanted[1]))


def _attention(products: int, causal: str = "is_causal", time: int = -2) -> Formula:
    """q [B, H, T, D], k [B, K, S, D], v [B, K, S, Dv], or with heads after the time, which is axis `time`."""

    def flops(shapes: Shapes, values: Mapping[str, Any]) -> float:
        q, k = _first(shapes, "query", "q"), _first(shapes, "key", "k")
        T, S, D = q[time], k[time], q[-1]
        pairs = float(T * S)
        if values.get(causal):
            # Position t sees those up to it, counted from the last where the lengths differ.
            pairs = float(T * S - T * (T - 1) / 2) if S >= T else float(S * (S + 1) / 2)
        return 2.0 * products * math.prod(q) / (T * D) * pairs * D if T and D else 0.0

    return flops


def _packed_backward(shapes: Shapes, values: Mapping[str, Any]) -> float:
    """Attention over q, k and v in one tensor, whose output is [B, H, T, D]."""
    out = _first(shapes, "out")
    T = out[-2]
    pairs = T * (T + 1) / 2 if values.get("causal") else float(T * T)
    return 2.0 * 5 * math.prod(out) / T * pairs if T else 0.0


def _mlp(shapes: Shapes, values: Mapping[str, Any]) -> float:
    rows = math.prod(_first(shapes, "x")[:-1])
    return 2.0 * rows * (math.prod(_first(shapes, "weight_1")) + math.prod(_first(shapes, "weight_2")))


def _mlp_backward(shapes: Shapes, values: Mapping[str, Any]) -> float:
    """A product for each gradient wanted: of x and the inner row, of both weights."""
    rows = math.prod(_first(shapes, "grad_out")[:-1])
    wanted = values.get("wanted") or [True] * 5
    first, second = math.prod(_first(shapes, "weight_1")), math.prod(_first(shapes, "weight_2"))
    inner = any(wanted[:3])
    return 2.0 * rows * (first * (bool(wanted[0]) + bool(wanted[1])) + second * (inner + bool(wanted[3])))


def _head_loss(shapes: Shapes, values: Mapping[str, Any]) -> float:
    """The logits, and in the same op the gradients that are wanted of the hidden rows and of the head."""
    wanted = values.get("wanted") or [False, False]
    rows = math.prod(_first(shapes, "hidden")[:-1])
    return 2.0 * rows * math.prod(_first(shapes, "weight")) * (1 + bool(wanted[0]) + bool(wanted[1]))


def _attention_layer(shapes: Shapes, values: Mapping[str, Any]) -> float:
    x = _first(shapes, "x")
    rows = math.prod(x[:-1])
    weights = math.prod(_first(shapes, "qkv_weight")) + math.prod(_first(shapes, "out_weight"))
    pairs = x[-2] * x[-2] / (2 if values.get("causal") else 1)
    return 2.0 * rows * weights + 4.0 * math.prod(x[:-2]) * pairs * x[-1]


FORMULAS: Mapping[str, Formula] = {
    "aten::mm": _product("self", "mat2"),
    "aten::addmm": _product("mat1", "mat2"),
    "aten::_addmm_activation": _product("mat1", "mat2"),
    "aten::bmm": _product("self", "mat2"),
    "aten::baddbmm": _product("batch1", "batch2"),
    "aten::mv": lambda shapes, values: 2.0 * math.prod(_first(shapes, "self")),
    "aten::addmv": lambda shapes, values: 2.0 * math.prod(_first(shapes, "mat")),
    "aten::_scaled_mm": _product("self", "mat2"),
    "aten::_int_mm": _product("self", "mat2"),
    "aten::linear": _linear,
    "mkldnn::_linear_pointwise": lambda shapes, values: (
        2.0 * math.prod(_first(shapes, "X")) * _first(shapes, "W")[0]
    ),
    "aten::convolution_overrideable": _convolution,
    "aten::cudnn_convolution": _convolution,
    "aten::mkldnn_convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _attention(2),
    "aten::_scaled_dot_product_efficient_attention": _attention(2),
    "aten::_scaled_dot_product_cudnn_attention": _attention(2),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(2),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(5),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(5),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(5),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(5),
    # The ops that launch the kernels, inside those above.
    "aten::_flash_attention_forward": _attention(2, time=-3),
    "aten::_flash_attention_backward": _attention(5, time=-3),
    "aten::_efficient_attention_forward": _attention(2, "custom_mask_type", -3),
    "aten::_efficient_attention_backward": _attention(5, "custom_mask_type", -3),
    "aten::_cudnn_attention_forward": _attention(2),
    "aten::_cudnn_attention_backward": _attention(5),
    "fuseline::attention": _attention(2, "causal"),
    "fuseline::attention_backward": _attention(5, "causal"),
    "fuseline::attention_packed_backward": _packed_backward,
    "fuseline::mlp": _mlp,
    "fuseline::mlp_forward": _mlp,
    "fuseline::mlp_backward": _mlp_backward,
    "fuseline::linear_cross_entropy_forward": _head_loss,
    "fuseline::self_attention_layer": _attention_layer,
    "fuseline::self_attention_layer_forward": _attention_layer,
    "fuseline::self_attention_layer_backward": lambda shapes, values: 2.0 * _attention_layer(shapes, values),
    "fuseline::quant_linear": lambda shapes, values: (
        2.0 * math.prod(_first(shapes, "x")) * float(values["out_features"])
    ),
    "fuseline::fused_linear": lambda shapes, values: (
        2.0 * math.prod(_first(shapes, "x")) * float(values["out_features"])
    ),
}
