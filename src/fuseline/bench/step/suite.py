"""Run the contenders of a case in turn, A B B A, and record what each takes."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from fuseline.acceleration.precision import matmul_format
from fuseline.bench.step.case import StepCase
from fuseline.bench.step.contenders import (
    NANOGPT_MODES,
    PEERS,
    Contender,
    build,
    make,
    nanogpt_source,
    why_not,
)
from fuseline.errors import InputError
from fuseline.records import Record, append, describe
from fuseline.timing import paired_ratio, peak_memory_gib, reset_peak_memory, summarize, synchronize
from fuseline.timing.flops import CONVENTIONS, flops_per_token, mfu
from fuseline.timing.steps import time_steps

SUITE = "step"
WARM_UP = 4
PLAIN = {"attention": "math", "norm": "torch", "loss": "float32", "dropout": 0.0}
ERROR_SEQUENCES = 2  # of a batch, on which loss and gradients are compared with float32's

Observer = Callable[[StepCase, str, str], None]
"""`observe(case, peer, phase)`; phases: "build", "run", "check", "skip"."""


@dataclass(frozen=True)
class StepBench:
    """What to time. `rounds` runs of `steps` steps for each contender; `nanogpt` is nanoGPT's model.py."""

    device: torch.device
    cases: tuple[StepCase, ...]
    peers: tuple[str, ...] = PEERS
    rounds: int = 8
    steps: int = 10
    grad_clip: float = 0.0
    nanogpt: Path | None = None
    seed: int = 1337

    def __post_init__(self) -> None:
        if unknown := [peer for peer in self.peers if peer not in PEERS]:
            raise InputError(f"Unknown peers: {', '.join(unknown)}. There are {', '.join(PEERS)}.")
        if self.rounds < 1 or self.steps < 1:
            raise InputError(f"{self.rounds} rounds of {self.steps} steps: a time needs one of each.")
        if self.nanogpt is not None:
            nanogpt_source(self.nanogpt)  # before other contenders are built and timed for minutes


@dataclass
class Outcome:
    """What one contender took. `errors`: of loss and gradient against float32."""

    contender: Contender
    compile_s: float
    peak_gib: float | None
    times_ms: list[float] = field(default_factory=list)
    errors: tuple[float, float] | None = None


def run(bench: StepBench, file: Path, observe: Observer) -> list[Record]:
    """Time every case; returns the records, which `file` gets case by case."""
    records: list[Record] = []
    for case in bench.cases:
        new = _run_case(bench, case, observe)
        append(file, new)
        records += new
    return records


def _run_case(bench: StepBench, case: StepCase, observe: Observer) -> list[Record]:
    environment, described = describe(bench.device), case.as_record()
    described["grad_clip"] = bench.grad_clip
    generator = torch.Generator().manual_seed(bench.seed)
    drawn = torch.randint(case.config.vocab_size, (case.batch, case.seqlen + 1), generator=generator)
    drawn = drawn.to(bench.device)
    batch = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    records, outcomes = [], []
    for name in bench.peers:
        reason = why_not(name, case, bench.device, bench.nanogpt)
        if reason is not None:
            observe(case, name, "skip")
            told = {**described, "reason": reason}
            records.append(Record.of(SUITE, told, "skipped", None, environment, peer=name))
            continue
        observe(case, name, "build")
        outcomes.append(_prepare(bench, case, name, batch))
    for turn in range(bench.rounds):
        for outcome in outcomes if turn % 2 == 0 else outcomes[::-1]:
            observe(case, outcome.contender.name, "run")
            take = functools.partial(outcome.contender.step, *batch)
            take()
            outcome.times_ms.append(time_steps(take, bench.device, steps=bench.steps))
    observe(case, "float32", "check")
    _compare_with_float32(case, outcomes, batch)
    for outcome in outcomes:
        outcome.contender.close()
        records += _records_of(bench, case, outcome, outcomes, described)
    outcomes.clear()
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return records


def _prepare(bench: StepBench, case: StepCase, name: str, batch: tuple[Tensor, Tensor]) -> Outcome:
    """Build and warm up; peak memory is what this contender adds to those that are there already."""
    torch.manual_seed(bench.seed)
    gc.collect()  # what an earlier contender left would be freed on this one's account
    synchronize(bench.device)
    before = torch.cuda.memory_allocated(bench.device) if bench.device.type == "cuda" else 0
    reset_peak_memory(bench.device)
    contender = make(name, case, bench.device, bench.nanogpt, bench.grad_clip)
    begin = time.perf_counter()
    for _ in range(WARM_UP):
        contender.step(*batch)
    synchronize(bench.device)
    seconds = time.perf_counter() - begin
    peak = peak_memory_gib(bench.device)
    return Outcome(contender, seconds, None if peak is None else peak - before / 2**30)


def _compare_with_float32(case: StepCase, outcomes: Sequence[Outcome], batch: tuple[Tensor, Tensor]) -> None:
    """Loss and gradient of each on the same few sequences and the same weights, without dropout, against
    plain PyTorch in float32."""
    few = tuple(part[:ERROR_SEQUENCES] for part in batch)
    with few[0].device:
        reference = build(case, PLAIN)
    weights = reference.state_dict()
    wanted_loss = reference(*few)
    wanted_loss.backward()
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    norm = torch.stack([g.double().square().sum() for g in wanted.values() if g is not None]).sum()
    for outcome in outcomes:
        module, loss = outcome.contender.module, outcome.contender.loss
        own = dict(module.named_parameters())
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name][: len(parameter)])  # its vocabulary may not be padded
        _without_dropout(module)
        module.zero_grad(set_to_none=True)
        with matmul_format(case.precision):
            found = loss(*few)
            found.backward()
        squares = [
            (p.grad.double() - wanted[name][: len(p)].double()).square().sum()  # type: ignore[union-attr, index]
            for name, p in own.items()
        ]
        gradient = (torch.stack(squares).sum() / norm).sqrt()
        outcome.errors = (abs(found.item() - wanted_loss.item()) / abs(wanted_loss.item()), gradient.item())
        module.zero_grad(set_to_none=True)


def _without_dropout(module: nn.Module) -> None:
    """The model in training, but nothing is dropped."""
    module.train()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout_p", "dropout"):  # of attention: ours, and nanoGPT's
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def _records_of(
    bench: StepBench,
    case: StepCase,
    outcome: Outcome,
    outcomes: Sequence[Outcome],
    described: dict[str, str | int | float | bool],
) -> list[Record]:
    environment, name = describe(bench.device), outcome.contender.name

    def record(metric: str, value: float | None, **interval: float | int) -> Record:
        return Record.of(SUITE, described, metric, value, environment, peer=name, **interval)  # type: ignore[arg-type]

    found = summarize(outcome.times_ms)
    tokens = case.batch * case.seqlen / found.median * 1e3
    records = [
        record("iteration_ms", found.median, low=found.low, high=found.high, n=found.n),
        record("tokens_per_s", tokens),
        record("compile_s", outcome.compile_s),
    ]
    if outcome.peak_gib is not None:
        records.append(record("peak_memory_gib", outcome.peak_gib))
    if outcome.errors is not None:
        records += [record("loss_error", outcome.errors[0]), record("grad_error", outcome.errors[1])]
    if (fp8 := outcome.contender.fp8) is not None:
        in_fp8 = sum(layer.in_fp8 for layer in fp8.layers)
        layers = {**described, "decided": "; ".join(fp8.summary())}
        records.append(
            Record.of(SUITE, layers, "layers_in_fp8", in_fp8, environment, peer=name, n=len(fp8.layers))
        )
        in_bf16 = next((o for o in outcomes if o.contender.name == "fuseline"), None)
        if in_bf16 is not None:
            ratio = paired_ratio(in_bf16.times_ms, outcome.times_ms)
            records.append(record("paired_over_bf16", ratio.value, low=ratio.low, high=ratio.high, n=ratio.n))
    config = case.config
    with torch.device("meta"):
        parameters = build(case, PLAIN).num_parameters()
    for metric in CONVENTIONS:
        flops = flops_per_token(parameters, config.num_layers, config.embed_dim, case.seqlen, metric)
        share = mfu(flops * tokens, str(environment.device))
        if share is not None:
            records.append(record(metric, share))
    peers = [o for o in outcomes if o.contender.name in NANOGPT_MODES]
    if peers and name not in NANOGPT_MODES:
        best = min(peers, key=lambda o: summarize(o.times_ms).median)
        ratio = paired_ratio(best.times_ms, outcome.times_ms)
        records.append(record("paired_speedup", ratio.value, low=ratio.low, high=ratio.high, n=ratio.n))
    return records
