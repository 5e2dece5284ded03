"""Softmax and LayerNorm at the shapes of the course's homework (Carnegie Mellon's LLM systems, assignment 3),
against the same computed operation by operation, as a small framework does.

Batch times length is 1,024 tokens, 8 heads, lengths to 512, hidden sizes to 2,048, fp32. What is timed is
the call as a user makes it, host and all; and the kernels alone, inside a CUDA graph. The homework's own
speed-ups (15.8 and 3.7 of LayerNorm, 6.5 and 0.5 of softmax, forward and backward) stood over a framework
that copied its tensors through the host for every call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fuseline.bench.ops.accuracy import errors_of
from fuseline.bench.ops.bound import BoundCase, Computation
from fuseline.bench.ops.captured import capture_peer, rotation
from fuseline.bench.ops.launches import count_launches
from fuseline.bench.ops.measure import LARGEST_ERROR, OURS
from fuseline.bench.ops.results import SUITE
from fuseline.bench.peers import PEERS, Peer
from fuseline.errors import InputError
from fuseline.ops import Case, Op, get
from fuseline.ops.op import Outputs
from fuseline.records import Record, append, describe
from fuseline.records.record import Scalar
from fuseline.timing import paired_ratio, summarize, time_steps

TOKENS, HEADS = 1024, 8
LENGTHS = (16, 32, 64, 128, 256, 512)
HIDDEN = (128, 256, 512, 768, 1024, 2048)
SHAPES: tuple[tuple[str, tuple[int, ...]], ...] = (
    *(("softmax", (TOKENS // length, HEADS, length, length)) for length in LENGTHS),
    *(("layer_norm", (TOKENS, hidden)) for hidden in HIDDEN),
)
ROUNDS, CALLS, WARMUP = 10, 50, 10

Observer = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Written:
    """A peer made of plain functions by op."""

    name: str
    functions: Mapping[str, Callable[..., Outputs]]
    overwrites: bool = False
    compiles: bool = False

    def why_not(self, device: torch.device) -> str | None:
        return None

    def version(self) -> str:
        return torch.__version__

    def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], Outputs]:
        return functools.partial(self.functions[op.name], **inputs)


def _composed_softmax(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = x + mask
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def _composed_layer_norm(
    x: torch.Tensor, normalized_shape: tuple[int, ...], weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / (variance + 1e-5).sqrt() * weight + bias


COMPOSED = Written("composed", {"softmax": _composed_softmax, "layer_norm": _composed_layer_norm})
TORCH = Written(
    "eager",
    {"softmax": lambda x, mask: F.softmax(x + mask, -1), "layer_norm": lambda x, **a: F.layer_norm(x, **a)},
)


def run(device: torch.device, out: Path, observe: Observer, *, quick: bool, seed: int) -> list[Record]:
    """Measure every shape; records are appended to `<out>/ops.jsonl`, with section "seed"."""
    shapes = (SHAPES[2], SHAPES[-2]) if quick else SHAPES
    records: list[Record] = []
    for number, (name, shape) in enumerate(shapes):
        observe(f"{name} {' x '.join(map(str, shape))}", number, len(shapes))
        new = _measure(get(name), shape, device, quick, seed)
        append(out / f"{SUITE}.jsonl", new)
        records += new
    observe("done", len(shapes), len(shapes))
    return records


def bind(op: Op, shape: tuple[int, ...], device: torch.device, seed: int) -> BoundCase:
    """Inputs as the homework's tests draw them: softmax with an additive mask of keys [B, 1, 1, S]."""
    draw: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(seed)}
    x = torch.randn(shape, **draw).requires_grad_()
    inputs: dict[str, Any]
    if op.name == "softmax":
        hidden = torch.rand((shape[0], 1, 1, shape[3]), **draw) < 0.2
        hidden[..., 0] = False
        inputs = {"x": x, "mask": torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -1e8)}
        leaves: tuple[torch.Tensor, ...] = (x,)
    else:
        weight, bias = (torch.randn(shape[-1:], **draw).requires_grad_() for _ in range(2))
        inputs = {"x": x, "normalized_shape": shape[-1:], "weight": weight, "bias": bias}
        leaves = (x, weight, bias)
    grad_out = torch.randn(shape, **draw)
    return BoundCase(op, Case("homework", shape), torch.float32, inputs, leaves, (grad_out,))


def _measure(op: Op, shape: tuple[int, ...], device: torch.device, quick: bool, seed: int) -> list[Record]:
    bound = bind(op, shape, device, seed)
    peers: tuple[Peer, ...] = (PEERS[OURS], TORCH, COMPOSED)
    for peer in peers:
        errors = errors_of(Computation.of(peer, bound), _truth(bound))
        if errors.worst > LARGEST_ERROR:
            raise InputError(f"{op.name} at {shape} by {peer.name} is wrong: error {errors.worst:.2g}.")
    n = shape[-1]
    case: dict[str, Scalar] = {"op": op.name, "dtype": "float32", "rows": math.prod(shape) // n, "n": n}
    records = []
    for direction in ("fw", "bw"):
        place = {**case, "direction": direction, "section": "seed"}
        with torch.set_grad_enabled(direction == "bw"):
            calls = {peer.name: _call(peer, bound, direction) for peer in peers}
            samples = _take_turns(calls, device, quick)
            launches = {name: count_launches(call, device) for name, call in calls.items()}
        records += _records(samples, launches, {**place, "captured": False}, device)
        if device.type == "cuda":
            sets = [bind(op, shape, device, seed + 1 + i) for i in range(rotation(bound.bytes_moved("fw")))]
            graphs = {peer.name: capture_peer(peer, sets, direction, device) for peer in peers}
            replays: dict[str, list[float]] = {name: [] for name in graphs}
            for number in range(ROUNDS):
                for name in graphs if number % 2 == 0 else reversed(list(graphs)):
                    replays[name].append(graphs[name].time(10).median)
            records += _records(replays, {}, {**place, "captured": True}, device)
    return records


def _truth(bound: BoundCase) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    inputs = {
        name: v.detach().double().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for name, v in bound.inputs.items()
    }
    out = COMPOSED.bind(bound.op, inputs)()
    assert isinstance(out, torch.Tensor)
    leaves = [v for v in inputs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    return (out.detach(),), torch.autograd.grad(out, leaves, bound.grads_out[0].double())


def _call(peer: Peer, bound: BoundCase, direction: str) -> Callable[[], object]:
    if direction == "fw":
        return Computation.of(peer, bound.without_gradients()).forward
    return Computation.of(peer, bound).backward()


def _take_turns(
    calls: Mapping[str, Callable[[], object]], device: torch.device, quick: bool
) -> dict[str, list[float]]:
    """Microseconds a call, host and all, of each round by name; every other round goes backwards."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        time_steps(call, device, steps=WARMUP)
    for number in range(2 if quick else ROUNDS):
        for name in calls if number % 2 == 0 else reversed(list(calls)):
            samples[name].append(1e3 * time_steps(calls[name], device, steps=5 if quick else CALLS))
    return samples


def _records(
    samples: Mapping[str, list[float]],
    launches: Mapping[str, int],
    place: Mapping[str, Scalar],
    device: torch.device,
) -> list[Record]:
    environment = describe(device)
    records = []
    for name, times in samples.items():
        time = summarize(times)
        figures: list[tuple[str, float, float | None, float | None]] = [
            ("time_us", time.median, time.low, time.high)
        ]
        if name != OURS:
            ratio = paired_ratio(times, samples[OURS])
            figures.append(("paired_speedup", ratio.value, ratio.low, ratio.high))
        if name in launches:
            figures.append(("launches", float(launches[name]), None, None))
        records += [
            Record.of(SUITE, place, metric, value, environment, peer=name, low=low, high=high, n=time.n)
            for metric, value, low, high in figures
        ]
    return records
