"""What others measured, as data: the tables that stand beside ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReferenceRow:
    """One published figure. `rung` is the name of our row that runs the same; `low`/`high` as the source
    gives them: a range for the anchors, mean minus and plus sigma for seed 003, nothing for seed 001."""

    preset: str
    rung: str
    iteration_ms: float
    batch: int | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_memory_gib: float | None = None


@dataclass(frozen=True)
class ReferenceTable:
    """Rows of one source. `combination` names the set of ours that runs them."""

    combination: str
    title: str
    hardware: str
    software: str
    note: str
    rows: tuple[ReferenceRow, ...]

    @property
    def gpu(self) -> str:
        """The GPU's short name, for the heading of a column."""
        return self.hardware.split(" x ")[1].split()[0]

    def row(self, rung: str, preset: str) -> ReferenceRow | None:
        return next((r for r in self.rows if r.rung == rung and r.preset == preset), None)


def _seed_003(rung: str, gpt2: tuple[float, ...], shakespeare: tuple[float, ...]) -> list[ReferenceRow]:
    return [
        ReferenceRow(size, rung, mean, low=mean - sigma, high=mean + sigma, mfu=mfu)
        for size, (mean, sigma, mfu) in (("gpt2", gpt2), ("shakespeare", shakespeare))
    ]


def _anchor(
    preset: str, rung: str, batch: int, ms: float, low: float, high: float, rate: int, mfu: float, gib: float
) -> ReferenceRow:
    return ReferenceRow(preset, rung, ms, batch, low, high, rate, mfu / 100, gib)


SEED_001 = ReferenceTable(
    combination="seed-001",
    title="Accelerating Large Language Models with Accelerated Transformers (PyTorch, 2023)",
    hardware="8 x A100 SXM4 80GB",
    software="PyTorch 2.0",
    note="nanoGPT, milliseconds a batch, dropout 0; the batch is not stated",
    rows=(
        ReferenceRow("gpt2", "naive", 143),
        ReferenceRow("gpt2", "math", 134),
        ReferenceRow("gpt2", "efficient", 119),
        ReferenceRow("gpt2", "flash", 113),
        ReferenceRow("gpt2", "flash padded", 87),
    ),
)

SEED_003 = ReferenceTable(
    combination="seed-003",
    title="What's new with PyTorch? (C. Dalinghaus)",
    hardware="1 x A100",
    software="PyTorch 2.0",
    note="nanoGPT's trainer, mean and sigma of 1000 iterations; gpt2 with gradient accumulation",
    rows=(
        *_seed_003("eager", (3107.334, 2.762, 0.43337), (16.029, 2.666, 0.22951)),
        *_seed_003("cudagraphs", (3098.297, 0.956, 0.43463), (16.828, 3.935, 0.21916)),
        *_seed_003("inductor", (2640.227, 5.773, 0.51023), (12.191, 1.556, 0.29920)),
    ),
)

ANCHORS = ReferenceTable(
    combination="anchors",
    title="nanoGPT's own model under each rung",
    hardware="1 x H100 80GB HBM3",
    software="torch 2.11.0+cu130",
    note="median of 5 runs of 20 steps, with their range; where a row was taken twice, the faster",
    rows=(
        _anchor("gpt2", "eager naive 50257", 16, 160.34, 160.18, 160.49, 102184, 8.8, 29.6),
        _anchor("gpt2", "eager math 50257", 16, 153.15, 153.12, 153.20, 106982, 9.2, 25.9),
        _anchor("gpt2", "eager efficient 50257", 16, 79.30, 79.29, 79.31, 206604, 17.9, 16.0),
        _anchor("gpt2", "eager flash 50257", 16, 73.03, 73.00, 73.04, 224348, 19.4, 16.0),
        _anchor("gpt2", "eager flash 50304", 16, 47.55, 47.48, 47.66, 344580, 29.8, 16.0),
        _anchor("gpt2", "eager cudnn 50304", 16, 46.05, 45.91, 46.20, 355789, 30.8, 16.1),
        _anchor("gpt2", "inductor naive 50257", 16, 55.37, 55.22, 55.40, 295909, 25.6, 22.1),
        _anchor("gpt2", "inductor flash 50257", 16, 40.01, 39.43, 40.10, 409540, 35.4, 13.0),
        _anchor("gpt2", "inductor flash 50304", 16, 37.01, 36.65, 37.11, 442745, 38.3, 11.5),
        _anchor("gpt2", "inductor default 50304", 16, 37.11, 36.77, 37.22, 441458, 38.2, 11.5),
        _anchor("gpt2", "inductor cudnn 50304", 16, 37.17, 36.84, 37.29, 440794, 38.1, 11.5),
        _anchor("gpt2", "inductor reduce-overhead 50304", 16, 36.25, 35.67, 36.56, 451999, 39.1, 12.9),
        _anchor("gpt2", "inductor default 50304 B=32", 32, 67.62, 67.30, 67.94, 484614, 41.9, 21.3),
        _anchor("gpt2", "inductor default 50304 B=64", 64, 132.67, 132.15, 133.22, 493969, 42.7, 40.8),
        _anchor("shakespeare", "eager naive", 64, 15.83, 15.65, 17.86, 1034801, 7.4, 2.5),
        _anchor("shakespeare", "eager sdpa", 64, 10.06, 9.18, 11.76, 1629378, 11.7, 1.6),
        _anchor("shakespeare", "cudagraphs", 64, 7.40, 7.34, 8.54, 2214387, 15.9, 1.5),
        _anchor("shakespeare", "inductor", 64, 6.24, 6.07, 10.31, 2626183, 18.8, 1.6),
        _anchor("shakespeare", "inductor reduce-overhead", 64, 5.08, 5.04, 5.27, 3228142, 23.2, 1.5),
    ),
)

REFERENCES: tuple[ReferenceTable, ...] = (SEED_001, SEED_003, ANCHORS)


def reference(combination: str) -> ReferenceTable | None:
    """The table beside the combination of that name, if it has one."""
    return next((table for table in REFERENCES if table.combination == combination), None)
