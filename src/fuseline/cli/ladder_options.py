"""The options of `fuseline ladder`, for all of its workloads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fuseline.cli.options import Recorded, Seeded

DEFAULT_BUDGET = {"cpu": "150s", "cuda": "8m"}
MODEL_BUDGET = {"cpu": "5m", "cuda": "8m"}


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    workload: str = "train"
    """train: a GPT that trains on text; generate: a language model with random weights, token by token (it
    uses only --preset, --checkpoint, --batch-size and --rungs of the options below)."""
    model: str | None = None
    """A model of your own instead of a preset: MODULE:FUNCTION or FILE.py:FUNCTION, a function that returns
    (model, batch) or (model, batch, loss_fn), or a Hugging Face folder. It runs unchanged first, then with
    TF32, bf16, the fused AdamW, accelerate, torch.compile and a recorded step. It uses only --mode, --rungs,
    --budget, --steps, --runs and --max-autotune of the options below, and for a folder --batch-size (4) and
    --seqlen (512)."""
    preset: str = "auto"
    """tiny, shakespeare, gpt2, gpt2-medium, gpt2-large, gpt2-xl; auto: gpt2 on a GPU, else tiny."""
    checkpoint: Path | None = None
    """With generate: folder of a run of `fuseline train gpt`, whose model takes the place of a preset's. Each
    rung then shows its perplexity on the held-out text."""
    data: str = "python"
    """Text to train on: python (this interpreter's standard library), shakespeare, openwebtext, or the path
    of a file or folder."""
    tokenizer: str = "auto"
    """char, bpe (trained on the text) or gpt2; auto: char for shakespeare, bpe for the rest."""
    batch_size: int | None = None
    """Sequences a step (default: the preset's)."""
    seqlen: int | None = None
    """Tokens a sequence (default: the preset's)."""
    mode: str = "cumulative"
    """cumulative: one rung after the other, keeping those that are faster; alone: each rung by itself over
    plain PyTorch; combination: named sets of rungs."""
    rungs: tuple[str, ...] = ()
    """Rungs, slots (precision, attention, ...) or combinations (seed-001, seed-003, anchors) to run,
    separated by spaces or commas. All rungs if none is named."""
    budget: Annotated[str | None, tyro.conf.arg(metavar="MINUTES")] = None
    """Time for the whole ladder: 4, 90s, 1.5h or none. Rungs that find no time are listed; the first build of
    the native library does not count. Default: 2.5 minutes on a CPU (5 with --model), 8 on a GPU."""
    steps: int = 20
    """The most steps in a timed run; fewer if the budget is short."""
    runs: int = 5
    """Timed runs of each rung, in turn with runs of the step that it is compared with."""
    resume: bool = False
    """Continue from the records in the output folder: rungs that this machine has measured do not run
    again."""
    max_batch: str = "kept"
    """How to find the largest batch (GPU only): none: not at all; fit: predict it from two sizes; kept: try
    it, in a process of its own, for the kept eager rungs and the fastest rung; all: try it for every rung."""

    max_autotune: bool = False
    """Time the best that torch does alone under torch.compile's max-autotune, too (GPU only). It compiles for
    minutes: give --budget as many more."""

    def budget_seconds(self, device: str) -> float | None:
        """What --budget says, or the default for such a device."""
        from fuseline.bench.ladder.budget import parse_duration

        usual = DEFAULT_BUDGET if self.model is None else MODEL_BUDGET
        return parse_duration(self.budget or usual[device.partition(":")[0]])
