"""The levers on a generation, rung upon rung: what each is worth in time a token and in memory.

First what carries out a step is replaced, then the format of its weights; last the model's own int4 copy
drafts tokens for it, and time is that of a token kept. With a trained model (`DecodeBench.run`) each rung has
its perplexity on held-out text too; weights are rounded to the nearest here, and what calibration makes good
`fuseline bench quality` tells.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fuseline import native
from fuseline.bench.compiling import tuned_here
from fuseline.bench.decode.contenders import Compiled, Contender
from fuseline.bench.decode.plain_torch import in_plain_torch
from fuseline.bench.decode.problems import DecodeBench, Problem, made_model
from fuseline.bench.decode.suite import SUITE, Observer, timed
from fuseline.bench.failure import describe_failure
from fuseline.bench.quality import QualityBench, perplexity, texts
from fuseline.errors import InputError, unknown_name
from fuseline.generation.decoder import Decoder
from fuseline.generation.speculation import Speculator
from fuseline.models.gpt import GPT
from fuseline.models.pretrained import LanguageModel
from fuseline.records import Record, append, describe
from fuseline.timing import Summary, peak_memory_gib, reset_peak_memory, summarize, time_steps


@dataclass(frozen=True)
class Rung:
    """One way to decode: its lever, who carries out a step, the format of the weights ("": as they are).
    What is `for_gpus` was behind plain torch when a CPU decoded llama-tiny, and is climbed on a CPU only
    where it is named."""

    name: str
    lever: str
    step: str
    format: str = ""
    for_gpus: bool = False


RUNGS = (
    Rung("eager", "none", "eager"),
    Rung("compiled", "fuse", "compiled"),
    Rung("cuda-graph", "less overhead", "recorded", for_gpus=True),
    Rung("fused", "custom kernels", "fused", for_gpus=True),
    Rung("int8", "quantize", "fused", "int8", for_gpus=True),
    Rung("int4", "quantize", "fused", "int4"),
    Rung("speculation", "speculate", "drafted", for_gpus=True),
)


def usual_rungs(device: torch.device) -> tuple[str, ...]:
    """What is climbed on `device` where no rung is named."""
    return tuple(rung.name for rung in RUNGS if device.type == "cuda" or not rung.for_gpus)


AHEAD = 4  # tokens that the model's own int4 copy drafts a round
HELD_OUT = 8  # batches of text that perplexity is over


def climb(
    bench: DecodeBench,
    out: Path,
    observe: Observer,
    *,
    rungs: tuple[str, ...] = (),
    cache_dir: Path | None = None,
) -> list[Record]:
    """Run the rungs (`usual_rungs` if none is named) with the first batch and position of `bench`; records
    are appended to `<out>/decode.jsonl` rung by rung. `cache_dir`: where the tokens of the run's text are
    kept."""
    known = {rung.name: rung for rung in RUNGS}
    for name in rungs:
        if name not in known:
            raise unknown_name("rung", name, known)
    native.ready(bench.device.type)
    wanted = [rung for rung in RUNGS if rung.name in (rungs or usual_rungs(bench.device))]
    plain = bench.formats[0]
    records: list[Record] = []
    held: tuple[str, LanguageModel] | None = None
    ground: float | None = None
    costs = None if bench.run is None else _Costs(bench, plain, cache_dir)
    for order, rung in enumerate(wanted):
        observe(rung.name, order, len(wanted))
        format = rung.format or plain
        if held is None or held[0] != format:
            held = None  # room for the next, before it is made
            gc.collect()
            held = format, made_model(replace(bench, formats=(format,)), format).model
        problem = Problem(bench.batches[0], format, bench.positions[0], bench.capacity, "fuseline")
        case: dict[str, Any] = {
            "section": "climb",
            "preset": bench.preset if bench.run is None else bench.run.name,
            "rung": rung.name,
            "lever": rung.lever,
            "order": order,
            "batch": problem.batch,
            "position": problem.position,
            "seqlen_k": problem.capacity,
            "format": format,
        }
        reset_peak_memory(bench.device)
        try:
            with tuned_here(bench.device):
                times = (_drafted if rung.step == "drafted" else _stepped)(rung, held[1], bench, problem)
        except (InputError, RuntimeError) as error:
            case["reason"] = str(error) if isinstance(error, InputError) else describe_failure(error)
            new = [Record.of(SUITE, case, "skipped", None, describe(bench.device))]
        else:
            if rung.step == "eager":
                ground = times.median
            new = list(_records(case, times, problem.batch, ground, bench.device))
            new += [] if costs is None else costs.records(case, format, held[1])
        append(out / f"{SUITE}.jsonl", new)
        records += new
    observe("done", len(wanted), len(wanted))
    return records


def _made(rung: Rung, model: LanguageModel, problem: Problem, device: torch.device) -> Contender:
    sizes: dict[str, Any] = {"batch": problem.batch, "capacity": problem.capacity}
    if rung.step == "fused":
        return Decoder(model, **sizes)
    if rung.step == "compiled":
        return Compiled(in_plain_torch(model), **sizes)
    if rung.step == "recorded" and device.type != "cuda":
        raise InputError("CUDA graphs are recorded on a GPU")
    return Decoder(in_plain_torch(model), **sizes, graphs=rung.step == "recorded")


def _stepped(rung: Rung, model: LanguageModel, bench: DecodeBench, problem: Problem) -> Summary:
    """Milliseconds a step. What carries it out ends here, with the model that it holds."""
    made = _made(rung, model, problem, bench.device)
    _, times = timed(made, model, bench, problem)
    made.close()
    return times


def _drafted(rung: Rung, model: LanguageModel, bench: DecodeBench, problem: Problem) -> Summary:
    """Milliseconds a token and row: those of a round over the tokens that its rows kept."""
    draft = made_model(replace(bench, formats=("int4",)), "int4").model
    capacity = problem.capacity - AHEAD - 1
    speculator = Speculator(model, draft, batch=problem.batch, capacity=capacity, ahead=AHEAD)
    gc.collect()
    reset_peak_memory(bench.device)  # which the draft's own weights made, before they were quantized
    draw = torch.Generator().manual_seed(bench.seed)
    size = problem.batch, problem.position - bench.before
    speculator.begin(torch.randint(0, model.config.vocab_size, size, generator=draw).tolist())
    speculator.advance()
    samples = []
    for _ in range(bench.runs):
        kept: list[int] = []
        rounds = max(1, bench.steps // (AHEAD + 1))  # about as many tokens as others take

        def advance(kept: list[int] = kept) -> None:
            kept.append(sum(map(len, speculator.advance())))

        taken_ms = rounds * time_steps(advance, bench.device, steps=rounds)
        samples.append(taken_ms * problem.batch / sum(kept))
    speculator.close()
    return summarize(samples)


class _Costs:
    """Perplexity of a run's model on its held-out text, format by format. A draft leaves the distribution as
    it is, and so does another way to carry out a step, but for rounding."""

    def __init__(self, bench: DecodeBench, plain: str, cache_dir: Path | None) -> None:
        assert bench.run is not None
        quality = QualityBench(bench.device, bench.run, (), HELD_OUT)
        self._texts, self._bench, self._plain = texts(quality, cache_dir), bench, plain
        self._found: dict[str, float] = {}

    def records(self, case: dict[str, Any], format: str, model: LanguageModel) -> Iterator[Record]:
        environment = describe(self._bench.device)
        found = self._of(format, model)
        yield Record.of(SUITE, case, "perplexity", found, environment, n=HELD_OUT)
        if format != self._plain:
            yield Record.of(SUITE, case, "loss_error", found / self._of(self._plain) - 1, environment)

    def _of(self, format: str, model: LanguageModel | None = None) -> float:
        if format not in self._found:
            model = model or made_model(self._bench, format).model
            assert isinstance(model, GPT)
            self._found[format] = perplexity(model, self._texts.crops(self._texts.held_out, HELD_OUT))
        return self._found[format]


def _records(
    case: dict[str, Any], times: Summary, batch: int, ground: float | None, device: torch.device
) -> Iterator[Record]:
    environment = describe(device)
    yield Record.of(
        SUITE, case, "iteration_ms", times.median, environment, low=times.low, high=times.high, n=times.n
    )
    yield Record.of(SUITE, case, "tokens_per_s", batch * 1e3 / times.median, environment, n=times.n)
    if ground is not None:
        yield Record.of(SUITE, case, "speedup", ground / times.median, environment, n=times.n)
    memory = peak_memory_gib(device)
    if memory is not None:
        yield Record.of(SUITE, case, "peak_memory_gib", memory, environment)
