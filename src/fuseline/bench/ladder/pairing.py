"""Runs of two steps in turn, A B B A, so that drift of clocks and temperature falls on both alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from fuseline.bench.ladder.contender import LEAD_IN, BatchSource, Contender
from fuseline.bench.ladder.learner import Learner


@dataclass
class Runs:
    """Milliseconds a step, run by run: `new` is what is measured, `old` (empty if alone) what it is paired
    with. `losses` are (step, loss) of the training that `new` went on with, `taken` its steps, lead-ins
    included; `data_wait_share` is the share of its time that it waited for batches."""

    new: list[float] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    taken: int = 0
    data_wait_share: float = 0.0

    @property
    def pair_ms(self) -> float:
        """Milliseconds of one new and one old step, one after the other."""
        return median(self.new) + (median(self.old) if self.old else 0.0)

    def add(self, more: Runs) -> None:
        """Put the runs that `more` made after these behind them."""
        share = len(more.new) / (len(self.new) + len(more.new))
        self.data_wait_share += share * (more.data_wait_share - self.data_wait_share)
        self.new += more.new
        self.old += more.old
        self.losses += more.losses
        self.taken += more.taken


def run_in_turn(
    new: Contender,
    old: Contender | None,
    batches: BatchSource,
    learner: Learner,
    pace: Iterable[int],
    before: int = 0,
    *,
    after_run: Callable[[int, int, float], None],
) -> Runs:
    """A run of each for every number of steps in `pace`, `before` steps after those that the learner has
    taken. `after_run(run, step, loss)` is called between the timed parts."""
    found = Runs()
    waited, timed = 0.0, 0.0
    for run, steps in enumerate(pace):
        order = [new] if old is None else ([old, new] if run % 2 == 0 else [new, old])
        for contender in order:
            contender.set_learning_rate(learner.rate(before + found.taken))
            ms, wait_ms = contender.run(batches, steps)
            if contender is old:
                found.old.append(ms)
                continue
            found.new.append(ms)
            waited, timed = waited + wait_ms * steps, timed + ms * steps
            found.taken += LEAD_IN + steps
            step, loss = learner.state.steps + before + found.taken, float(contender.loss)
            found.losses.append((step, loss))
            after_run(run + 1, step, loss)
    found.data_wait_share = waited / timed
    return found
