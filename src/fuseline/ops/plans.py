"""Which kernel computes a problem, and why. The answer comes from the functions that the launchers use.

    print(fuseline.ops.explain("softmax", (64, 1024), torch.bfloat16, gpu="h200"))

For each op here one function in csrc/kernels/plans decides from the shape, dtype, addresses and device. The
launcher launches what that function says. `explain` asks the same function, which is also compiled into
`libfuseline_torch.so`, so it needs no GPU and can answer for any GPU. For attention it answers for our own
kernels; `fuseline.picker.explain` says whether another library's are taken instead. For a self-attention
layer it answers for the kernels of `implementation="fused"`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fuseline import native
from fuseline.errors import InputError, unknown_name
from fuseline.native.gpus import GPUS, Gpu
from fuseline.ops.attention.problem import CAUSAL, Problem
from fuseline.ops.op import DTYPES

__all__ = ["GPUS", "NORMS", "PLANNED", "Explanation", "Gpu", "Plan", "explain"]


GRANTED_CLUSTER = 8
"""Blocks of a cluster that every GPU with clusters grants; of larger ones the launcher asks first."""


@dataclass(frozen=True)
class Plan:
    """One launch: which kernel, why, and how its threads are laid out."""

    work: str
    """What the launch computes, such as "forward"."""
    kernel: str
    """The name that profilers show; empty where no kernel takes the problem."""
    reason: str
    blocks: int = 0
    threads_per_row: int = 0
    """In one block."""
    rows_per_block: int = 0
    """At a time; 0 of kernels that do not go by rows, whose threads a row are all threads of a block."""
    blocks_per_row: int = 0
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""
    workspace_bytes: int = 0
    elements_per_access: int = 0
    """Of kernels that do not go by rows: their threads a row are all threads of a block. Else 0."""
    fallback: Plan | None = None
    """What runs where the GPU does not grant such clusters of blocks."""

    @property
    def layout(self) -> str:
        """How the threads are laid out, in words."""
        if self.elements_per_access or not self.rows_per_block:
            access = (
                [f"{_count(self.elements_per_access, 'element')} an access"]
                if self.elements_per_access
                else []
            )
            blocks = f"{_count(self.blocks, 'block')} of {self.threads_per_row} threads"
            if self.blocks_per_row > 1:
                blocks += f" in clusters of {self.blocks_per_row}"
            return ", ".join([blocks, *access, *self._memory()])
        threads = self.threads_per_row * self.blocks_per_row
        parts = [_count(self.blocks, "block"), f"{_count(threads, 'thread')} a row"]
        if self.blocks_per_row > 1:
            parts[-1] += f" in a cluster of {self.blocks_per_row} blocks"
        if self.rows_per_block > 1:
            parts.append(f"{self.rows_per_block} rows a block")
        return ", ".join(parts + self._memory())

    def _memory(self) -> list[str]:
        shared = [f"{self.shared_bytes:,} bytes of shared memory a block"] if self.shared_bytes else []
        workspace = [f"{self.workspace_bytes:,} bytes of workspace"] if self.workspace_bytes else []
        return shared + workspace

    def __str__(self) -> str:
        if not self.kernel:
            return f"{self.work}: {self.reason}"
        because = [f"  because {self.reason}"] if self.reason else []
        lines = [f"{self.work}: {self.kernel}", *because, f"  {self.layout}"]
        if self.fallback:
            other = f"{self.fallback.kernel}, {self.fallback.layout}"
            lines.append(f"  where the GPU grants no cluster of {self.blocks_per_row}: {other}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What would run for one problem of an op on one GPU."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gpu: Gpu
    plans: tuple[Plan, ...]

    def __str__(self) -> str:
        shape, dtype = list(self.shape), str(self.dtype).removeprefix("torch.")
        head = f"{self.op} of {shape} in {dtype} on {self.gpu.name}"
        return "\n".join([head, *map(str, self.plans)])


@dataclass(frozen=True)
class _Rows:
    """Rows of a contiguous tensor, and where its first element stands."""

    count: int
    length: int
    dtype: torch.dtype
    address: int
    gpu: Gpu
    shape: tuple[int, ...]

    @property
    def fp16(self) -> bool:
        return self.dtype is torch.float16

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def arguments(self) -> tuple[list[int], int, int, int]:
        """The first arguments of every plan in csrc/torch/plans.cpp."""
        return self.gpu.numbers(), self.count, self.length, self.itemsize


def explain(
    op: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    gpu: str | Gpu | None = None,
    address: int = 0,
    **options: float | str,
) -> Explanation:
    """Which kernels compute `op` over the last dimension of a contiguous tensor, and why.

    Args:
        op: "softmax", "cross_entropy", "gelu", "swiglu", "geglu", "embedding", "quant_linear", or a norm:
            "layer_norm", "rms_norm", or one of these after "add_" or "dropout_add_"; "attention",
            "decode_attention", "self_attention_layer", "decode_step" or "argmax_step".
        shape: of the input, [..., N]; of embedding, of the output; of attention, of q: [B, H, T, D], and of
            decode_attention, [B, H, D]; of self_attention_layer, of x: [B, S, E]; of decode_step, of the
            stream: [1, C]; of argmax_step, of the logits: [B, V].
        dtype: float32, float16 or bfloat16; of norms that of y, and of the branch that is added.
        gpu: a name in `GPUS`, or a `Gpu`; by default the current CUDA device.
        address: of the tensors, modulo 128 bytes; 0 for whole tensors, which torch allocates aligned.
        options: of softmax: `causal`, `masked` (dense and aligned) and `scale`; of cross_entropy: `weight`
            (there are class weights), `label_smoothing` and `soft_cap`; of gelu: `bias`; of swiglu and
            geglu: `halves` (the shape is that of one tensor with gate and up beside each other); of
            embedding: `rows` of the table and `positions` (there is a table of them); of
            quant_linear: `out_features`, `format` ("plain", "int8" or "int4"), and for int4 `group_size` and
            `zero_points`; of norms:
            `direction` ("forward" or "backward"; by default both), `fp32_stream` (what is normalized is
            float32, as under autocast), `fp32_weights`, and behind "dropout_add_" `x_bias`; of attention:
            `kv_heads`, `keys` (by default as many as query rows), `causal`, `window` (keys to the left),
            `masked` (a boolean mask over [B, 1, 1, S]), `bias` (an additive one over [1, H, T, S], whose
            gradient is computed), `dropout`, and `sequences` (the B sequences are packed into one row);
            of decode_attention: `kv_heads`, `keys` (positions) and `cache` ("same", "int8" or "fp8"); of
            self_attention_layer: `heads`, `kv_heads`, `head_dim` (by default E / heads), `out_dim`,
            `shared` (one projection for all heads), `tf32` and `captured` (in a CUDA graph); of
            decode_step: `layers`, `heads`, `kv_heads`, `head_dim`, `ffn_dim`, `vocab_size` and `swiglu`.

    Raises InputError for an op without plans, for an option that it does not have, for a shape without
    elements, for a dtype or address that kernels do not take, for an unknown GPU, and where the native core
    is missing.
    """
    if op not in PLANNED:
        raise InputError(
            f"{unknown_name('op with plans', op, PLANNED)} docs/kernels.md says how the others choose."
        )
    for name in options:
        known = list(inspect.signature(PLANNED[op]).parameters)[1:]
        if name not in known:
            raise unknown_name(f"option of {op}", name, known)
    shape = tuple(shape)
    if not shape or min(shape) < 1:
        raise InputError(f"shape is {list(shape)}; give one size of 1 or more for each dimension.")
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype}; kernels take {', '.join(map(str, DTYPES))}.")
    if address < 0 or address % dtype.itemsize:
        raise InputError(f"address is {address}; elements of {dtype} stand at multiples of {dtype.itemsize}.")
    if not native.ready("cpu"):
        raise InputError("The native core is missing, which decides. `fuseline doctor` says why.")
    on = _resolved(gpu)
    rows = _Rows(math.prod(shape[:-1]), shape[-1], dtype, address, on, shape)
    return Explanation(op, shape, dtype, on, PLANNED[op](rows, **options))


def _resolved(gpu: str | Gpu | None) -> Gpu:
    if isinstance(gpu, Gpu):
        return gpu
    if gpu is not None:
        if gpu not in GPUS:
            raise unknown_name("GPU", gpu, GPUS)
        return GPUS[gpu]
    if not torch.cuda.is_available():
        raise InputError(f"There is no GPU here; name one with --gpu (gpu= in Python): {', '.join(GPUS)}.")
    found = torch.cuda.get_device_properties()
    return Gpu(
        found.name,
        found.multi_processor_count,
        found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        found.shared_memory_per_multiprocessor,
        2 * found.memory_clock_rate * found.memory_bus_width // 8_000_000,  # two transfers a cycle
        clusters=found.major >= 9,
        warpgroups=(found.major, found.minor) == (9, 0),
    )


def _softmax(rows: _Rows, causal: bool = False, masked: bool = False, scale: float = 1.0) -> tuple[Plan, ...]:
    def forward(refused: int) -> _Planned:
        mask_in_vectors = rows.length * rows.itemsize % 16 == 0
        options = (scale, bool(causal), bool(masked), mask_in_vectors, rows.fp16)
        return torch.ops.fuseline.plan_softmax_forward(*rows.arguments, [rows.address] * 2, *options, refused)

    def backward(refused: int) -> _Planned:
        return torch.ops.fuseline.plan_softmax_backward(
            *rows.arguments, [rows.address] * 3, rows.fp16, refused
        )

    return _plan("forward", forward), _plan("backward", backward)


def _cross_entropy(
    rows: _Rows, weight: bool = False, label_smoothing: float = 0.0, soft_cap: float = 0.0
) -> tuple[Plan, ...]:
    plain = not weight and label_smoothing == 0 and soft_cap == 0

    def with_gradient(grad: bool) -> Callable[[int], _Planned]:
        return lambda refused: torch.ops.fuseline.plan_cross_entropy(
            *rows.arguments, [rows.address] * 2, grad, plain, rows.fp16, refused
        )

    return (
        _plan("loss and gradient", with_gradient(True)),
        _plan("loss alone", with_gradient(False)),
    )


def _gelu(rows: _Rows, bias: bool = False) -> tuple[Plan, ...]:
    def ask(bias_gradient: bool) -> Callable[[int], _Planned]:
        options = (rows.address, bool(bias), bias_gradient, rows.fp16)
        return lambda refused: torch.ops.fuseline.plan_gelu(*rows.arguments, *options)

    return _plan("forward", ask(False)), _plan("backward", ask(bool(bias)))


def _glu(rows: _Rows, halves: bool = False) -> tuple[Plan, ...]:
    if halves and rows.length % 2:
        raise InputError(f"The last size is {rows.length}; gate and up are its halves, so it has to be even.")
    of_one = replace(rows, length=rows.length // 2) if halves else rows

    def ask(refused: int) -> _Planned:
        return torch.ops.fuseline.plan_glu(*of_one.arguments, rows.address, bool(halves))

    return _plan("forward", ask), _plan("backward", ask)


def _embedding(tokens: _Rows, rows: int = 50257, positions: bool = False) -> tuple[Plan, ...]:
    def ask(backward: bool) -> Callable[[int], _Planned]:
        options = tokens.address, rows, bool(positions), tokens.fp16, backward
        return lambda refused: torch.ops.fuseline.plan_embedding(*tokens.arguments, *options)

    return _plan("forward", ask(False)), _plan("backward", ask(True))


def _quant_linear(
    rows: _Rows,
    out_features: int = 4096,
    format: str = "int8",
    group_size: int = 128,
    zero_points: bool = False,
) -> tuple[Plan, ...]:
    if out_features < 1:
        raise InputError(f"out_features is {out_features}; a weight has one row or more.")
    if rows.itemsize != 2:
        return (Plan("forward", "", "torch multiplies float32 with the dequantized weight"),)
    whole = rows.address % 16 == 0
    weight = out_features, rows.length, format, not rows.fp16, whole, group_size, bool(zero_points)

    def ask(refused: int) -> _Planned:
        return torch.ops.fuseline.plan_linear(rows.gpu.numbers(), rows.count, *weight)

    return (_plan("forward", ask),)


_NORM_OF = {"": 0, "add": 1, "dropout_add": 2}
"""What a norm is of, as NormOf of csrc/kernels/plans/norms.h counts it."""


def _norm(name: str) -> Callable[..., tuple[Plan, ...]]:
    before, _, kind = name.removesuffix("_norm").rpartition("_")
    of, centred = _NORM_OF[before], kind == "layer"
    added, drops = of > 0, of == 2

    def plans(
        rows: _Rows,
        direction: str | None = None,
        fp32_stream: bool = False,
        fp32_weights: bool = False,
        x_bias: bool = False,
    ) -> tuple[Plan, ...]:
        if direction not in (None, "forward", "backward"):
            raise InputError(f"direction is {direction!r}; it is forward or backward.")
        if x_bias and not drops:
            raise InputError(f"x_bias is of the norms behind a dropout; {name} has none.")
        wide = 4 if fp32_stream else rows.itemsize
        given = rows.gpu.numbers(), rows.count, rows.length, [wide, rows.itemsize], rows.address
        wide_weights, fp16 = bool(fp32_weights) or rows.itemsize == 4, rows.dtype == torch.float16

        def forward(refused: int) -> _Planned:
            return torch.ops.fuseline.plan_norm_forward(
                *given, fp16, centred, of, drops, wide_weights, refused
            )

        def backward(refused: int) -> _Planned:
            of_branch = drops or (added and wide != rows.itemsize)
            there = [drops, added, True, of_branch, True, centred, bool(x_bias)]
            return torch.ops.fuseline.plan_norm_backward(*given, fp16, centred, wide_weights, there, refused)

        asks = {"forward": forward, "backward": backward}
        return tuple(_plan(work, ask) for work, ask in asks.items() if direction in (None, work))

    return plans


def _attention(
    q: _Rows,
    kv_heads: int = 0,
    keys: int = 0,
    causal: bool = False,
    window: int = -1,
    masked: bool = False,
    bias: bool = False,
    dropout: float = 0.0,
    sequences: bool = False,
) -> tuple[Plan, ...]:
    if len(q.shape) != 4:
        raise InputError(f"shape is {list(q.shape)}; attention takes the shape of q, [B, H, T, D].")
    if masked and bias:
        raise InputError("masked and bias are both given; attention has one mask.")
    (B, H, T, D), S = q.shape, keys or q.shape[2]
    if H % (kv_heads or H):
        raise InputError(f"kv_heads is {kv_heads}, which does not divide {H} heads.")
    problem = Problem(
        torch.device("cuda"),
        q.dtype,
        *(1 if sequences else B, H, kv_heads or H, T * B if sequences else T, S * B if sequences else S, D),
        causal="bottom_right" if causal else "none",
        window_left=window,
        mask="bool" if masked else "float_grad" if bias else "none",
        mask_dims="bs" if masked else "hts" if bias else "",
        sequences=B if sequences else 0,
        max_seqlen_q=T,
        max_seqlen_k=S,
        dropout_p=dropout,
    )
    return tuple(plan for work in ("forward", "backward") for plan in attention_plans(problem, q.gpu, work))


_MASKS = {"none": 0, "bool": 1, "float": 2, "float_grad": 2}


def attention_plans(problem: Problem, gpu: Gpu, work: str) -> tuple[Plan, ...]:
    """What our own kernels launch for whole tensors, forward or backward; the first names the reason and the
    workspace of all. `blocks` of kernels named `short_...` are problems: as many blocks as the GPU holds take
    them in turn. Where `sum_left` is the last, it and the one before come again until no rows are left."""
    p = problem
    sizes = [p.batch, p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim]
    kinds = [DTYPES.index(p.dtype), CAUSAL.index(p.causal), _MASKS[p.mask]]
    mask_dims = [p.mask != "none" and name in p.mask_dims for name in "bhts"]
    packed = [p.sequences, p.max_seqlen_q, p.max_seqlen_k]
    options = float(p.soft_cap), p.dropout_p, p.sinks, p.mask == "float_grad", work == "backward"
    planned = torch.ops.fuseline.plan_attention(
        gpu.numbers(), sizes, kinds, [p.window_left, p.window_right], mask_dims, packed, *options
    )
    return _launches(work, *planned)


_CACHES = ("same", "int8", "fp8")


def _decode_attention(q: _Rows, kv_heads: int = 0, keys: int = 4096, cache: str = "same") -> tuple[Plan, ...]:
    if len(q.shape) != 3:
        raise InputError(f"shape is {list(q.shape)}; decode_attention takes the shape of q, [B, H, D].")
    if cache not in _CACHES:
        raise unknown_name("cache", cache, _CACHES)
    (B, H, D), kinds = q.shape, (DTYPES.index(q.dtype), _CACHES.index(cache))
    sizes = [B, H, kv_heads or H, D, keys]
    return (
        _plan("forward", lambda _: torch.ops.fuseline.plan_decode_attention(q.gpu.numbers(), sizes, *kinds)),
    )


def _self_attention_layer(
    x: _Rows,
    heads: int = 8,
    kv_heads: int = 0,
    head_dim: int = 0,
    out_dim: int = 0,
    shared: bool = False,
    tf32: bool = False,
    captured: bool = False,
) -> tuple[Plan, ...]:
    if len(x.shape) != 3:
        raise InputError(f"shape is {list(x.shape)}; self_attention_layer takes the shape of x, [B, S, E].")
    if heads < 1 or heads % (kv_heads or heads):
        raise InputError(f"kv_heads is {kv_heads}, which does not divide {heads} heads.")
    B, S, E = x.shape
    sizes = [B, S, E, heads, kv_heads or heads, head_dim or E // heads, out_dim or E]
    given = x.gpu.numbers(), sizes, DTYPES.index(x.dtype), bool(tf32), bool(shared), bool(captured)

    def plans(work: str) -> tuple[Plan, ...]:
        return _launches(work, *torch.ops.fuseline.plan_self_attention_layer(*given, work == "backward"))

    return plans("forward") + plans("backward")


def _decode_step(
    x: _Rows,
    layers: int = 12,
    heads: int = 12,
    kv_heads: int = 0,
    head_dim: int = 64,
    ffn_dim: int = 0,
    vocab_size: int = 50257,
    swiglu: bool = False,
) -> tuple[Plan, ...]:
    if x.count != 1:
        raise InputError(f"shape is {list(x.shape)}; decode_step computes one row, of shape [1, C].")
    sizes = [layers, x.length, heads, kv_heads or heads, head_dim, ffn_dim or 4 * x.length, vocab_size]

    def ask(refused: int) -> _Planned:
        return torch.ops.fuseline.plan_decode_step(
            x.gpu.numbers(), sizes, DTYPES.index(x.dtype), bool(swiglu)
        )

    return (_plan("step", ask),)


def _argmax_step(logits: _Rows) -> tuple[Plan, ...]:
    return (_plan("step", lambda refused: torch.ops.fuseline.plan_argmax_step(*logits.arguments)),)


NORMS = tuple(f"{of}{kind}_norm" for of in ("", "add_", "dropout_add_") for kind in ("layer", "rms"))

PLANNED: dict[str, Callable[..., tuple[Plan, ...]]] = {
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "gelu": _gelu,
    "swiglu": _glu,
    "geglu": _glu,
    "embedding": _embedding,
    "quant_linear": _quant_linear,
    "attention": _attention,
    "decode_attention": _decode_attention,
    "self_attention_layer": _self_attention_layer,
    "decode_step": _decode_step,
    "argmax_step": _argmax_step,
    **{name: _norm(name) for name in NORMS},
}
"""The ops that `explain` knows; each takes the rows and the op's own options."""

_Planned = tuple[str, str, list[int]]


def _plan(work: str, ask: Callable[[int], _Planned], refused: int = 0) -> Plan:
    kernel, reason, numbers = ask(refused)
    if not kernel:
        return Plan(work, kernel, reason)
    blocks, threads, rows, cluster, shared, refusable, workspace, wide = numbers
    fallback = None
    if cluster > GRANTED_CLUSTER:
        other = _plan(work, ask, refusable)
        fallback = other.fallback or other  # which itself may need a cluster that is too large
    return Plan(work, kernel, reason, blocks, threads, rows, cluster, shared, workspace, wide, fallback)


def _launches(work: str, kernels: Sequence[str], reason: str, numbers: Sequence[int]) -> tuple[Plan, ...]:
    """Plans of launches that run one after the other; the first has the reason and the workspace of all."""
    if not kernels:
        return (Plan(work, "", reason),)
    workspace, *rest = numbers
    plans = []
    for i, kernel in enumerate(kernels):
        blocks, threads, cluster, shared = rest[4 * i : 4 * i + 4]
        plans.append(Plan(work, kernel, "", blocks, threads, 0, cluster, shared))
    return (replace(plans[0], reason=reason, workspace_bytes=workspace), *plans[1:])


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
