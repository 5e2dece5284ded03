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
from dataclasses import dataclass

import torch

from fuseline import native
from fuseline.errors import InputError, unknown_name
from fuseline.native.gpus import GPUS, Gpu
from fuseline.ops.op import DTYPES
from fuseline.ops.plans import attention, decoding, elementwise, optimizer, rows
from fuseline.ops.plans.plan import Plan
from fuseline.ops.plans.problem import Rows

PLANNED: dict[str, Callable[..., tuple[Plan, ...]]] = {
    "softmax": rows.softmax,
    "cross_entropy": rows.cross_entropy,
    "gelu": elementwise.gelu,
    "swiglu": elementwise.glu,
    "geglu": elementwise.glu,
    "embedding": elementwise.embedding,
    "quant_linear": decoding.quant_linear,
    "attention": attention.attention,
    "decode_attention": attention.decode_attention,
    "self_attention_layer": attention.self_attention_layer,
    "decode_step": decoding.decode_step,
    "argmax_step": decoding.argmax_step,
    "adamw": optimizer.adamw,
    "gradient_norm": optimizer.gradient_norm,
    **{name: rows.norm(name) for name in rows.NORMS},
}
"""What `explain` knows, the ops and the two parts of an optimizer's step; each takes the rows and options of
its own."""


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
            "decode_attention", "self_attention_layer", "decode_step" or "argmax_step"; of the optimizer
            "adamw" or "gradient_norm".
        shape: of the input, [..., N]; of embedding, of the output; of attention, of q: [B, H, T, D], and of
            decode_attention, [B, H, D]; of self_attention_layer, of x: [B, S, E]; of decode_step, of the
            stream: [1, C]; of argmax_step, of the logits: [B, V]; of the optimizer, of one parameter.
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
            decode_step: `layers`, `heads`, `kv_heads`, `head_dim`, `ffn_dim`, `vocab_size` and `swiglu`; of
            the optimizer: `tensors` (how many parameters have that shape).

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
    asked = Rows(math.prod(shape[:-1]), shape[-1], dtype, address, on, shape)
    return Explanation(op, shape, dtype, on, PLANNED[op](asked, **options))


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
