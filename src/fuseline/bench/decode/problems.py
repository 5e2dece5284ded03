"""What is decoded: a model, contenders, batches, formats and places in the context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fuseline.bench.compiling import OWN_CLOCK
from fuseline.bench.decode.contenders import COMPILED, DEFAULTS, FORMATS, PEERS
from fuseline.bench.decode.plain_torch import FLOATS
from fuseline.bench.drawn import check_count, drawn_lengths
from fuseline.errors import InputError, unknown_name
from fuseline.training.text_generator import Numbers, TextGenerator, Wanted, load

WARM_UP = 3  # steps: the first records or compiles


@dataclass(frozen=True)
class Problem:
    """`batch` rows in `format`, timed around `position` of `capacity`, which may be a `drawn` one."""

    batch: int
    format: str
    position: int
    capacity: int
    peer: str
    drawn: bool = False


@dataclass(frozen=True)
class DecodeBench:
    """What to measure. A run takes `steps` tokens; there are `runs` of them, the middle one at a position.

    With `budget_seconds` a problem is left out that would not be done in time, by how long its contender's
    others took; with `resume` what the same commit measured into the same folder before is not done again.
    `jobs` processes compile beforehand. Besides, the first format and batch are timed around `drawn`
    positions from `seed`, fewer where the cache has no room for so many. With `own_clock` inductor tunes by
    its own clock, and its contenders have names of their own in records: both stand, and the better counts.
    """

    device: torch.device
    preset: str
    batches: tuple[int, ...] = (1, 8)
    positions: tuple[int, ...] = (200,)
    capacity: int = 512
    formats: tuple[str, ...] = ("bf16", "int8", "int4", "fp8")
    peers: tuple[str, ...] = DEFAULTS
    steps: int = 10
    runs: int = 7
    seed: int = 1337
    budget_seconds: float | None = None
    resume: bool = False
    run: Path | None = None
    """Folder of a run of `fuseline train gpt`: its model in the place of the preset's random weights."""
    jobs: int = 0
    gptfast: Path | None = None
    """Folder of a checkout of gpt-fast, whose files are a contender."""
    drawn: int = 0
    own_clock: bool = False

    def __post_init__(self) -> None:
        for peer in self.peers:
            if peer not in PEERS:
                raise unknown_name("peer", peer, PEERS)
        for name in self.formats:
            if name not in FORMATS["fuseline"]:
                raise unknown_name("format", name, FORMATS["fuseline"])
        fewest = {"rows": min(self.batches, default=1), "tokens": self.steps, "runs": self.runs}
        for what, number in fewest.items():
            if number < 1:
                raise InputError(f"{number} {what} leave nothing to measure. Take one or more.")
        check_count(self.drawn)
        before = self.before
        for position in self.positions:
            if position <= before or position + self.tokens - before >= self.capacity:
                raise InputError(
                    f"Position {position} of {self.capacity} leaves no room for {self.runs} runs of "
                    f"{self.steps} tokens around it. Take fewer of them, or another position."
                )

    @property
    def tokens(self) -> int:
        """Of all runs and the warm-up."""
        return WARM_UP + self.runs * self.steps

    @property
    def before(self) -> int:
        """Of these, before the middle."""
        return WARM_UP + self.runs * self.steps // 2

    def recorded(self, peer: str) -> str:
        """The name of a contender in records."""
        return peer + OWN_CLOCK if self.own_clock and peer in COMPILED else peer

    def within(self, context: int) -> DecodeBench:
        """The same for a model of so many positions: no further, with fewer tokens a run if need be."""
        if context >= self.capacity:
            return self
        steps = max(1, min(self.steps, (context - WARM_UP - 2) // self.runs))
        after = self.runs * steps - self.runs * steps // 2
        positions = tuple(min(position, context - after - 1) for position in self.positions)
        return replace(self, capacity=context, steps=steps, positions=positions)

    def problems(self) -> tuple[Problem, ...]:
        """All of them, those of one format together, and of these those of one contender."""
        return tuple(
            Problem(batch, format, position, self.capacity, peer, drawn)
            for format in self.formats
            for peer in self.peers
            if format in FORMATS.get(peer, FLOATS)
            for batch, position, drawn in self._places(format)
        )

    def _places(self, format: str) -> list[tuple[int, int, bool]]:
        """Rows and positions that are measured in a format, and whether these were drawn."""
        listed = [(batch, position, False) for batch in self.batches for position in self.positions]
        if not self.drawn or format != self.formats[0]:
            return listed
        first, last = self.before + 1, self.capacity - 1 - self.tokens + self.before
        positions = drawn_lengths(self.seed, first, last, self.positions, count=self.drawn)
        return [*listed, *((self.batches[0], position, True) for position in positions)]


def made_model(bench: DecodeBench, format: str, rows: int = 1) -> TextGenerator:
    """The model of `bench.run` or with random weights, its linear layers in `format`, but for those that are
    faster without for so many rows. Whether a problem's cache has room beside it each will see."""
    return load(
        bench.run,
        None if bench.run else bench.preset,
        device=bench.device,
        dtype=torch.float32 if format == "fp32" else torch.bfloat16,
        wanted=Wanted(rows, 1, 1),
        quant=None if format in FLOATS else format,
        vocabulary=Numbers(),
        seed=bench.seed,
        timed=True,
    )
