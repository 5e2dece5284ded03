"""Points under the roof: our ops, and the examples of the lecture (ReLU in fp32 and int8, four sines).

The intensity is operations a byte that must move. A comparison and a sine count as one operation each, as the
lecture counts; four sines one after another read and write between them, so that eager PyTorch stands at a
quarter of the intensity of one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fuseline.bench.failure import describe_failure
from fuseline.bench.hardware.figure import Figure, rate, skipped
from fuseline.bench.hardware.probes import FOUR_SINES, RELU_FP32, RELU_INT8
from fuseline.bench.ops.bound import Computation, bind_inputs
from fuseline.bench.ops.measure import directions
from fuseline.bench.peers import PEERS
from fuseline.ops import Op, registered
from fuseline.records.record import Scalar
from fuseline.timing import time_calls

EXAMPLES, OPS = "example", "roofline"
GPU_BYTES, CPU_BYTES = 2**29, 2**25
GPU_ELEMENTS, CPU_ELEMENTS = 2**27, 2**20
LENGTH = 4096


@dataclass(frozen=True)
class Example:
    """An elementwise function of the lecture; `kind` is that of our own kernel."""

    name: str
    dtype: torch.dtype
    operations: int
    kind: int
    function: Callable[[torch.Tensor], torch.Tensor]


def _four_sines(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sin().sin().sin()


LECTURE = (
    Example("ReLU fp32", torch.float32, 1, RELU_FP32, torch.relu),
    Example("ReLU int8", torch.int8, 1, RELU_INT8, torch.relu),
    Example("sin four times", torch.float32, 4, FOUR_SINES, _four_sines),
)


def measure_examples(device: torch.device, probes: Any, seed: int) -> Iterator[Figure]:
    """Each example in eager, inductor and ours: operations a second, and a byte."""
    size = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    generator = torch.Generator(device).manual_seed(seed)
    for example in LECTURE:
        x = torch.randint(-100, 100, (size // example.dtype.itemsize,), device=device, generator=generator)
        x = x.to(example.dtype) / 50 if example.dtype.is_floating_point else x.to(example.dtype)
        wanted = example.function(x)
        ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "eager": example.function,
            "inductor": torch.compile(example.function, dynamic=False, fullgraph=True),
            "fuseline": functools.partial(probes.elementwise, kind=example.kind),
        }
        for peer, function in ways.items():
            try:
                torch.testing.assert_close(function(x), wanted)
                time = time_calls(functools.partial(function, x), device, repeats=10, warmup=2)
            except Exception as error:  # a compiler may raise anything, and the others still count
                yield skipped(EXAMPLES, example.name, describe_failure(error), peer)
                continue
            passes = example.operations if peer == "eager" else 1
            intensity = example.operations / (2 * passes * example.dtype.itemsize)
            case = {"dtype": str(example.dtype).removeprefix("torch.")}
            amount = x.numel() * example.operations / 1e6
            yield rate(EXAMPLES, example.name, "tflops", amount, time, peer=peer, case=case)
            yield Figure(EXAMPLES, example.name, "intensity", intensity, peer=peer, case=case)
            moved = 2 * passes * x.nbytes / 1e3
            yield rate(EXAMPLES, example.name, "bandwidth_gbs", moved, time, peer=peer, case=case)
        torch.compiler.reset()


def measure_ops(device: torch.device, seed: int) -> Iterator[Figure]:
    """Every op of ours at one size in bf16, forward and backward."""
    elements = GPU_ELEMENTS if device.type == "cuda" else CPU_ELEMENTS
    for op in registered():
        try:
            yield from _points(op, elements, device, seed)
        except RuntimeError as error:  # what torch, CUDA and our own library raise
            yield skipped(OPS, op.name, describe_failure(error))


def _points(op: Op, elements: int, device: torch.device, seed: int) -> Iterator[Figure]:
    n = min(op.lengths, key=lambda length: abs(length - LENGTH), default=LENGTH)
    bound = bind_inputs(op, op.sweep(max(1, elements // n), n), torch.bfloat16, device, seed)
    ours = PEERS["fuseline"]
    for direction in directions(op):
        with torch.set_grad_enabled(direction != "fw"):
            if direction == "fw":
                call: Callable[[], object] = Computation.of(ours, bound.without_gradients()).forward
            else:
                computation = Computation.of(ours, bound)
                both = direction == "fwbw"
                call = computation.forward_and_backward if both else computation.backward()
            time = time_calls(call, device, repeats=10, warmup=2)
        flops, moved = bound.flops(direction), bound.bytes_moved(direction)
        case: dict[str, Scalar] = {"op": op.name, "dtype": "bfloat16", "direction": direction, "n": n}
        yield rate(OPS, op.name, "tflops", flops / 1e6, time, case=case)
        yield Figure(OPS, op.name, "intensity", flops / moved, case=case)
        yield rate(OPS, op.name, "bandwidth_gbs", moved / 1e3, time, case=case)
