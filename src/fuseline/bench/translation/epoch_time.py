"""How long an epoch takes under each set of kernels, in each way to carry out a step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fuseline.bench.failure import describe_failure
from fuseline.bench.translation.kernel_sets import KERNEL_SETS
from fuseline.bench.translation.learner import Learner
from fuseline.data.pair_tokens import PairDataset
from fuseline.timing import time_steps
from fuseline.training.translation_config import TranslateConfig

# The limit is not compiled: a compiler would remove what it computes for nothing.
EAGER_SETS = ("formulas", "torch", "fuseline", "nothing")
COMPILED_SETS = ("formulas", "fuseline")
WARM_UP = 6
FEWEST_ROUNDS, MOST_ROUNDS = 6, 20


@dataclass
class Timed:
    """One set of kernels: milliseconds a step, by round; or why there are none."""

    kernels: str
    times_ms: list[float] = field(default_factory=list)
    compile_s: float = 0.0
    batches_per_epoch: int = 0
    skipped: str | None = None


def time_epochs(
    config: TranslateConfig,
    dataset: PairDataset,
    *,
    device: torch.device,
    precision: str,
    execution: str,
    kernels: Sequence[str],
    seconds: float,
    observe: Callable[[str], None],
) -> list[Timed]:
    """Time steps of each of `kernels` in turns, there and back, for about `seconds` after warming up."""
    outcomes = {name: Timed(name) for name in kernels}
    learners: dict[str, Learner] = {}
    for name in kernels:
        observe(f"{execution} {precision}: warming up {name}")
        try:
            learner = Learner(
                config,
                dataset,
                KERNEL_SETS[name],
                device=device,
                precision=precision,
                execution=execution,
                steps=10**6,
            )
            for _ in range(WARM_UP):
                learner.advance()
        except Exception as error:  # a compiler may raise anything, and the others still count
            outcomes[name].skipped = describe_failure(error)
            continue
        learners[name] = learner
        outcomes[name].compile_s = learner.step.compile_seconds
        outcomes[name].batches_per_epoch = learner.batches.batches_per_epoch
    round_ms = sum(time_steps(learner.advance, device, steps=5) for learner in learners.values())
    steps = max(2, min(50, int(1e3 * seconds / MOST_ROUNDS / max(round_ms, 1e-3))))
    begin = time.monotonic()
    for number in range(MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and time.monotonic() - begin > seconds:
            break
        observe(f"{execution} {precision}: round {number + 1}")
        turns = list(learners.items())
        for name, learner in turns if number % 2 == 0 else reversed(turns):
            learner.advance()  # untimed: fills the queue and the caches that another left cold
            outcomes[name].times_ms.append(time_steps(learner.advance, device, steps=steps))
    for learner in learners.values():
        learner.close()
    learners.clear()
    gc.collect()
    torch.compiler.reset()
    return list(outcomes.values())
