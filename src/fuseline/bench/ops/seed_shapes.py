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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

from fuseline.bench.failure import describe_failure
from fuseline.bench.ops.accuracy import errors_of
from fuseline.bench.ops.bound import BoundCase, Computation
from fuseline.bench.ops.captured import Captured, capture_peer, rotation
from fuseline.bench.ops.launches import count_launches
from fuseline.bench.ops.measure import LARGEST_ERROR, OURS
from fuseline.bench.ops.results import SUITE, skip_record
from fuseline.bench.peers import PEERS, Peer, UnsupportedError, find_peers
from fuseline.bench.peers.plain import hidden_keys
from fuseline.errors import InputError
from fuseline.ops import Case, Op, get
from fuseline.ops.op import Outputs
from fuseline.records import Environment, Record, append, describe
from fuseline.records.record import Scalar
from fuseline.timing import paired_ratio, summarize, time_steps

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
ROUNDS, CALLS, WARMUP = 10, 50, 10

Observer = Callable[[str, int, int], None]


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


def run(
    device: torch.device,
    out: Path,
    observe: Observer,
    *,
    quick: bool,
    seed: int,
    ops: tuple[str, ...] = (),
    peers: tuple[str, ...] = tuple(PEERS),
) -> list[Record]:
    """Measure every shape of `ops` (all if none is named) by `peers` and by composition; records are appended
    to `<out>/ops.jsonl`, with section "seed"."""
    shapes = [shape for shape in (QUICK if quick else SHAPES) if not ops or shape.op in ops]
    if not shapes:
        raise InputError(f"--seed-shapes are of softmax and layer_norm, and --ops names {', '.join(ops)}.")
    records: list[Record] = []
    file = out / f"{SUITE}.jsonl"
    here: list[Peer] = [COMPOSED]
    for peer in find_peers((OURS, *peers)):
        if reason := peer.why_not(device):
            records.append(skip_record(peer, reason, {"op": "all"}, describe(device)))
        else:
            here.append(peer)
    append(file, records)
    for number, shape in enumerate(shapes):
        observe(str(shape), number, len(shapes))
        with torch._functorch.config.patch("donated_buffer", False):  # a second backward over the same graph
            new = _measure(shape, here, device, quick, seed)
        append(file, new)
        records += new
        torch.compiler.reset()
    observe("done", len(shapes), len(shapes))
    return records


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


def _measure(
    shape: Shape, peers: Sequence[Peer], device: torch.device, quick: bool, seed: int
) -> list[Record]:
    bound = bind(shape, device, seed)
    truth, environment = bound.truth(), describe(device)
    able, records = [], []
    for peer in peers:
        try:
            errors = errors_of(Computation.of(peer, bound), truth)
        except UnsupportedError as reason:
            why: str | None = str(reason)
        except Exception as error:  # a peer's compiler may raise anything, and the others still count
            if peer.name in (OURS, COMPOSED.name):
                raise
            why = describe_failure(error)
        else:
            wrong = errors.worst > LARGEST_ERROR
            why = f"computes something else: error {errors.worst:.2g} against float64" if wrong else None
            if wrong and peer.name == OURS:
                raise InputError(f"{shape} by {peer.name} is wrong: error {errors.worst:.2g}.")
        if why is None:
            able.append(peer)
        else:
            records.append(skip_record(peer, why, {**shape.case, **_PLACE, "captured": False}, environment))
    for direction in ("fw", "bw"):
        place = {**shape.case, **_PLACE, "direction": direction}
        with torch.set_grad_enabled(direction == "bw"):
            calls = {peer.name: _call(peer, bound, direction) for peer in able}
            samples = _take_turns(calls, device, quick)
            # On a CPU torch's operators are counted, and compiled code calls none.
            counted = [peer.name for peer in able if device.type == "cuda" or not peer.compiles]
            launches = {name: count_launches(calls[name], device) for name in counted}
        records += _records(samples, launches, {**place, "captured": False}, environment)
        if device.type == "cuda":
            sets = [bind(shape, device, seed + 1 + i) for i in range(rotation(bound.bytes_moved("fw")))]
            graphs: dict[str, Captured] = {}
            for peer in able:
                try:
                    graphs[peer.name] = capture_peer(peer, sets, direction, device)
                except Exception as error:  # one that waits for the device cannot be captured
                    if peer.name == OURS:
                        raise
                    why = f"cannot be captured in a CUDA graph: {describe_failure(error)}"
                    records.append(skip_record(peer, why, {**place, "captured": True}, environment))
            replays: dict[str, list[float]] = {name: [] for name in graphs}
            for number in range(ROUNDS):
                for name in graphs if number % 2 == 0 else reversed(list(graphs)):
                    replays[name].append(graphs[name].time(10).median)
            records += _records(replays, {}, {**place, "captured": True}, environment)
    return records


_PLACE: Mapping[str, Scalar] = {"direction": "fw", "section": "seed"}


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
    environment: Environment,
) -> list[Record]:
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
