"""Which kind of work an op or a kernel does: one table, read from top to bottom.

What launched a kernel decides where it is known, since an op's name says what the work is for. Inside a
replayed CUDA graph only the kernel's name is there, and a kernel that inductor generated carries the names of
the operations fused into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fuseline.profiling.trace import OPTIMIZER, Call

KINDS = (
    "products",
    "attention",
    "norms",
    "loss",
    "pointwise",
    "copies and casts",
    "optimizer",
    "communication",
    "other",
)


@dataclass(frozen=True)
class Rule:
    """`pattern` is searched for in a name, whatever the case of its letters."""

    kind: str
    pattern: re.Pattern[str]


def _rule(kind: str, *patterns: str) -> Rule:
    assert kind in KINDS
    return Rule(kind, re.compile("|".join(patterns), re.IGNORECASE))


# Ops by their names. The first that fits decides: attention before the softmax in its name, the loss before
# the product that is fused with it.
OPS: tuple[Rule, ...] = (
    _rule("communication", r"^(c10d|_c10d_functional|nccl|gloo|record_param_comms)|::all_(reduce|gather)"),
    _rule("optimizer", r"_fused_(adam|sgd|adagrad)", r"_foreach_", r"^fuseline::(adam|gradient_norm)"),
    _rule(
        "attention",
        r"scaled_dot_product|_flash_attention|_efficient_attention|_fused_sdp|flex_attention",
        r"^fuseline::(attention|decode_attention|self_attention_layer)",
        r"flash_attn|_native_multi_head_attention|_transform_bias_rescale_qkv",
    ),
    _rule("loss", r"cross_entropy|nll_loss|log_softmax|kl_div|mse_loss|binary_cross"),
    _rule("norms", r"(layer|rms|group|batch|instance)_norm", r"^fuseline::(fold_)?norm", r"cudnn_batch_norm"),
    _rule(
        "products",
        r"^aten::(mm|addmm|bmm|baddbmm|addbmm|addmv|mv|dot|matmul|linear|einsum|_scaled_mm|_scaled_grouped_mm)$",
        r"^aten::(_int_mm|_weight_int\w*|_grouped_mm|mkldnn_linear\w*|_addmm_activation|linear_backward)$",
        r"^(mkldnn|quantized|mkl|onednn)::\w*linear",
        r"convolution|conv[123]d|thnn_conv|lstm|gru|_cudnn_rnn",
        r"^fuseline::(mlp|quant_linear|fused_linear|linear)",
    ),
    _rule("attention", r"^aten::(_softmax\w*|softmax|_masked_softmax|_safe_softmax)$", r"^fuseline::softmax"),
    _rule(
        "copies and casts",
        r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|_cat|stack|_foreach_copy_|fill_|zero_|constant_pad_nd)$",
        r"^aten::(split_with_sizes_copy|_chunk_cat|_local_scalar_dense|item|repeat|roll|index_copy_?)$",
        r"^aten::(zeros|ones|zeros_like|ones_like|new_zeros|full|full_like|expand_copy|repeat_interleave)$",
        r"^fuseline::fp8_(rows|transpose)",
    ),
    _rule("other", r"embedding|index_select|gather|scatter|sort|topk|multinomial|arange|unique|cumsum|rand"),
    _rule("other", r"^aten::index(_put_?|_add_?|_fill_?)?$|_index_put_impl_|^fuseline::(take_l|decode)"),
    _rule(
        "pointwise",
        r"^fuseline::(gelu|geglu|swiglu|glu|rope|scale_rows|fp8_activation)",
        r"^aten::(add|sub|mul|div|pow|sqrt|rsqrt|exp|log|neg|abs|sin|cos|tanh|sigmoid|erf|reciprocal|clamp)\w*$",
        r"^aten::(gelu|silu|relu|leaky_relu|elu|hardswish|softplus|mish|threshold|threshold_backward|glu)\w*$",
        r"^aten::(where|masked_fill|lerp|maximum|minimum|addcmul|addcdiv|sign|floor|ceil|round|square)\w*$",
        r"^aten::(eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|__and__|__or__|isnan|isinf|isfinite)\w*$",
        r"dropout|bernoulli|^aten::(sum|mean|amax|amin|max|min|any|all|var|var_mean|std|prod|norm|linalg_vector_norm)$",
        r"^aten::(tril|triu|softmax_backward\w*|_softmax_backward\w*|_weight_norm\w*)$",
    ),
)  # fmt: skip

# Kernels by their names, for those that no op explains.
KERNELS: tuple[Rule, ...] = (
    _rule("communication", r"nccl|all_?reduce_kernel|all_?gather|reduce_?scatter|symm_mem|multimem"),
    _rule(
        "optimizer",
        r"multi_tensor_apply|FusedOptimizer|FusedAdam|\badam\w*kernel",
        r"fuseline::.*\b(adamw|gradient_norm)\b",
    ),
    _rule(
        "attention",
        r"sdpa|flash_(fwd|bwd|fprop|bprop)|\bfmha|attention|cudnn::fusion::|flashattn|FlashAttn",
        r"fuseline::(attention|decode_attention|small_layer|self_attention|settle|raise|split_combine)",
        r"fuseline::\w*softmax|softmax_warp_(forward|backward)|cunn_SoftMax(Forward|Backward)\w*<\w*Soft[Mm]ax(?!.*Log)",
    ),
    _rule("loss", r"fuseline::(head_|scale_rows)|nll_loss|LogSoftMax|log_softmax|cross_entropy"),
    _rule(
        "norms",
        r"fuseline::\w*norm",
        r"layer_norm|LayerNorm|layernorm|rms_norm|RMSNorm|GammaBeta|GroupNorm|batch_norm|RowwiseMoments",
    ),
    _rule(
        "products",
        r"nvjet|gemm|cutlass|cublas|splitK|xmma|\bgemv|\bwgrad|\bdgrad|cudnn.*conv|implicit_convolve|winograd",
        r"fuseline::\w*(linear|gemv|product|mlp|gelu_product)",
    ),
    _rule(
        "copies and casts",
        r"^mem(cpy|set)|^Memcpy|^Memset|CatArray|copy_kernel|direct_copy|FillFunctor|fuseline::fp8_(rows|transpose)",
        r"batched_transpose|bfloat16tofloat32|float16_copy|unrolled_elementwise_kernel.*(copy|LoadWithCast)",
    ),
    _rule("other", r"embedding|index|gather|scatter|sort|Radix|Onesweep|cub::|thrust::|philox|distribution"),
    _rule("other", r"fuseline::(decode_step|step_kernel|argmax_step)"),
    _rule("pointwise", r"elementwise|reduce_kernel|vectorized|dropout"),
    _rule("pointwise", r"fuseline::(gelu|glu|geglu|swiglu|rope)"),
)  # fmt: skip

# What inductor fused, by the names of the operations in the kernel: the heaviest among them decides.
FUSED: tuple[Rule, ...] = (
    _rule("attention", r"flex_attention|scaled_dot_product|flash_attention|sdpa"),
    _rule("loss", r"log_softmax|nll_loss|cross_entropy"),
    _rule("norms", r"(layer|rms|group|batch)_norm|var_mean"),
    _rule("products", r"(^|_)(mm|addmm|bmm|baddbmm)(_|$)|convolution|_scaled_mm"),
    _rule("attention", r"(^|_)_?softmax"),
    _rule("other", r"embedding|index|scatter|gather|sort"),
    _rule("optimizer", r"_foreach|adam"),
)  # fmt: skip

# Operations that only move numbers: a kernel with nothing else in it copies or casts.
MOVES = frozenset({
    "_to_copy", "to_copy", "to", "copy", "copy_", "clone", "cat", "stack", "view", "_unsafe_view",
    "unsafe_view", "transpose", "permute", "t", "expand", "squeeze", "unsqueeze", "reshape", "slice",
    "select", "split", "split_with_sizes", "detach", "alias", "as_strided", "contiguous", "fill", "full",
    "zeros", "ones", "zeros_like", "ones_like", "empty", "convert_element_type", "constant_pad_nd",
    "getitem", "lift_fresh_copy",
})  # fmt: skip

_TRITON = re.compile(r"^triton_(poi|red|per|tem|for|unk|mix)_fused_(.+?)(_\d+)?$")
_CPP = re.compile(r"^(?:graph_\d+_)?cpp_fused_(.+?)(_\d+)?$")
_CPP_TEMPLATE = re.compile(r"^(?:graph_\d+_)?cpp_(packed_gemm|bmm|flex|CppMicroGemm)", re.IGNORECASE)
_ATEN = re.compile(
    r"(?:^|_)(_?(?:" + "|".join(sorted((m.strip("_") for m in MOVES), key=len, reverse=True)) + r"))(?=_|$)"
)


def kind_of(name: str, call: Call | None = None, fused: Iterable[str] = ()) -> str:
    """The kind of work of a kernel (on a CPU: an op) named `name` that `call` asked for. `fused` are the ATen
    operations in it, where inductor generated it and said so."""
    if call is not None and any(c.is_range and c.name.startswith(OPTIMIZER) for c in call.around()):
        return "optimizer"
    generated = is_generated(name)
    if generated:
        return _kind_of_fused(name, list(fused))
    if call is not None:
        for around in call.around():
            if not around.is_range and (kind := _first(OPS, around.name)) is not None:
                return kind
    return _first(KERNELS, name) or _first(OPS, name) or "other"


def is_generated(name: str) -> bool:
    """Whether inductor generated the kernel of that name."""
    return bool(_TRITON.match(name) or _CPP.match(name) or _CPP_TEMPLATE.match(name))


def operations_in(name: str) -> str:
    """The operations that a generated kernel's name lists, as it lists them: `add_native_layer_norm`."""
    found = _TRITON.match(name)
    if found:
        return found.group(2)
    found = _CPP.match(name)
    return found.group(1) if found else ""


def _kind_of_fused(name: str, fused: list[str]) -> str:
    if _CPP_TEMPLATE.match(name):
        return "attention" if "flex" in name.lower() else "products"
    listed = operations_in(name)
    text = " ".join(fused) or listed
    kind = _first(FUSED, text)
    if kind is not None:
        return kind
    if fused:
        return "copies and casts" if set(fused) <= MOVES else "pointwise"
    # The name joins the operations by underscores, which they have inside as well: take out those that move.
    return "copies and casts" if not _ATEN.sub("", listed).strip("_") else "pointwise"


def _first(rules: Iterable[Rule], name: str) -> str | None:
    return next((rule.kind for rule in rules if rule.pattern.search(name)), None)
