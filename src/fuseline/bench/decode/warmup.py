"""What contenders compile of a step, compiled by several processes before any of these is measured."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence

import torch

from fuseline.bench.compiling import Compilers, Task, briefly_shared, one_task, timed_briefly
from fuseline.bench.decode.contenders import COMPILED, contender
from fuseline.bench.decode.plain_torch import FLOATS
from fuseline.bench.decode.problems import DecodeBench, Problem, made_model
from fuseline.generation.footprint import footprint
from fuseline.training.text_generator import config_of

QUIET_SECONDS = (
    240.0  # until the first of them is done: a step of Llama-2-7B compiles for a minute and a half
)
BESIDE_BYTES = 2 * 2**30  # of what a layer unpacks, and of a recorded graph


def compile_steps(
    compilers: Compilers,
    bench: DecodeBench,
    problems: Sequence[Problem],
    observe: Callable[[int, int], None],
    within: float = math.inf,
) -> None:
    """Run a step of each that is compiled, once for all positions; see `Compilers.run`."""
    left_out = {"transformers-compiled", *(() if bench.gptfast else ("gptfast-files",))}
    there = [peer for peer in COMPILED if peer not in left_out]
    steps = {(p.peer, p.format, p.batch): p for p in problems if p.peer in there}
    tasks = [Task(_compile, (bench, problem), _room(bench, problem)) for problem in steps.values()]
    compilers.run(tasks, observe, within, QUIET_SECONDS)


def _room(bench: DecodeBench, problem: Problem) -> int:
    config = config_of(bench.run, None if bench.run else bench.preset)
    if config is None:
        return BESIDE_BYTES
    wanted = footprint(
        config,
        batch=problem.batch,
        prompt=1,
        capacity=problem.capacity,
        dtype=torch.float32 if problem.format == "fp32" else torch.bfloat16,
        format=None if problem.format in FLOATS else problem.format,
    )
    return wanted.total + BESIDE_BYTES


def _compile(bench: DecodeBench, problem: Problem) -> None:
    with one_task(bench.device), timed_briefly(briefly_shared):
        _step(bench, problem)
    gc.collect()  # a recorded graph holds its memory until then
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def _step(bench: DecodeBench, problem: Problem) -> None:
    model = made_model(bench, problem.format).model
    made = contender(
        problem.peer, model, batch=problem.batch, capacity=problem.capacity, gptfast=bench.gptfast
    )
    made.begin([[0]] * problem.batch)
    for _ in range(2):  # the second is recorded
        made.advance()
    made.close()
