"""Softmax and LayerNorm at the shapes of the course's homework (Carnegie Mellon's LLM systems, assignment 3),
against the same computed operation by operation, as a small framework does, and against everyone who has
such a kernel.

Batch times length is 1,024 tokens, 8 heads, lengths to 512, hidden sizes to 2,048, fp32. Besides, softmax in
bf16 with each of the options that attention gives it (`MASKS`). What is timed is the call as a user makes it,
host and all; and the kernels alone, inside a CUDA graph. The homework's own
speed-ups (15.8 and 3.7 of LayerNorm, 6.5 and 0.5 of softmax, forward and backward) stood over a framework
that copied its tensors through the host for every call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fuseline.bench.ops.bound import BoundCase
from fuseline.bench.peers.plain import hidden_keys
from fuseline.ops import Case, Op, get
from fuseline.ops.op import Outputs
from fuseline.records.record import Scalar

TOKENS, HEADS = 1024, 8
LENGTHS = (16, 32, 64, 128, 256, 512)
HIDDEN = (128, 256, 512, 768, 1024, 2048)
MASKED_LENGTHS = (32, 128, 512)
MASKS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "scaled": {"scale": 0.125},
    "boolean": {"mask": "boolean"},
    "causal": {"causal": True},
    "scaled, causal": {"scale": 0.125, "causal": True},
    "scaled, causal, boolean": {"scale": 0.125, "causal": True, "mask": "boolean"},
}
"""What softmax is asked for beside the homework's own mask, which is added: options of `ops.softmax`. A
boolean mask says which keys are seen."""


@dataclass(frozen=True)
class Shape:
    """One softmax or LayerNorm. `masked` names one of `MASKS`; None is the homework's own form."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    masked: str | None = None

    def __str__(self) -> str:
        told = f"{self.op} {' x '.join(map(str, self.shape))}"
        return told if self.masked is None else f"{told}, {self.masked}"

    @property
    def case(self) -> dict[str, Scalar]:
        """As it stands in records."""
        n = self.shape[-1]
        dtype = str(self.dtype).removeprefix("torch.")
        case: dict[str, Scalar] = {"op": self.op, "dtype": dtype, "rows": math.prod(self.shape) // n, "n": n}
        return case if self.masked is None else {**case, "mask": self.masked}


def _scores(length: int) -> tuple[int, ...]:
    return TOKENS // length, HEADS, length, length


SHAPES = (
    *(Shape("softmax", _scores(length)) for length in LENGTHS),
    *(Shape("layer_norm", (TOKENS, hidden)) for hidden in HIDDEN),
    *(
        Shape("softmax", _scores(length), torch.bfloat16, masked)
        for length in MASKED_LENGTHS
        for masked in MASKS
    ),
)
QUICK = (SHAPES[2], SHAPES[10], SHAPES[-1])


def _composed_softmax(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """`hidden` are the keys that a boolean mask or the causal limit hides, made once."""
    scores = x if scale == 1.0 else x * scale
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def _composed_layer_norm(
    x: torch.Tensor, normalized_shape: tuple[int, ...], weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / (variance + 1e-5).sqrt() * weight + bias


class Composed:
    """The formulas, operation by operation."""

    name = "composed"
    overwrites = False
    compiles = False

    def why_not(self, device: torch.device) -> str | None:
        return None

    def version(self) -> str:
        return torch.__version__

    def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], Outputs]:
        if op.name == "layer_norm":
            return functools.partial(_composed_layer_norm, **inputs)
        return functools.partial(_composed_softmax, hidden=hidden_keys(inputs), **inputs)


COMPOSED = Composed()


def bind(shape: Shape, device: torch.device, seed: int) -> BoundCase:
    """Inputs as the homework's tests draw them: softmax with a mask of keys [B, 1, 1, S]."""
    draw: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(seed)}
    x = torch.randn(shape.shape, **draw).to(shape.dtype).requires_grad_()
    inputs: dict[str, Any] = {"x": x}
    leaves: tuple[torch.Tensor, ...] = (x,)
    if shape.op == "layer_norm":
        weight, bias = (torch.randn(shape.shape[-1:], **draw).requires_grad_() for _ in range(2))
        inputs |= {"normalized_shape": shape.shape[-1:], "weight": weight, "bias": bias}
        leaves = (x, weight, bias)
    else:
        hidden = torch.rand((shape.shape[0], 1, 1, shape.shape[3]), **draw) < 0.2
        hidden[..., 0] = False
        if shape.masked is None:
            inputs["mask"] = torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -1e8)
        else:
            options = MASKS[shape.masked]
            inputs |= {**options, "mask": ~hidden} if "mask" in options else options
    grad_out = torch.randn(shape.shape, **draw).to(shape.dtype)
    op = get(shape.op)
    return BoundCase(op, Case("homework", shape.shape), shape.dtype, inputs, leaves, (grad_out,))
