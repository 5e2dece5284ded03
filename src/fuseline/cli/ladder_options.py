"""What `fuseline ladder` takes, whichever its workload."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fuseline.cli.options import Recorded, Seeded

DEFAULT_BUDGET = {"cpu": "3m", "cuda": "8m"}
MODEL_BUDGET = {"cpu": "5m", "cuda": "8m"}


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    workload: str = "train"
    """train: a GPT that trains on text; generate: a language model with random weights, token by token (of
    the options below --preset, --checkpoint, --batch-size and --rungs count)."""
    model: str | None = None
    """A model of your own in the place of a preset: MODULE:FUNCTION or FILE.py:FUNCTION, a function that
    returns (model, batch) or (model, batch, loss_fn), or a Hugging Face folder. It runs as it came, eagerly,
    then with TF32, bf16, the fused AdamW, accelerate, torch.compile and a recorded step. Beside it --mode,
    --rungs, --budget, --steps and --runs count, and for a folder --batch-size (4) and --seqlen (512)."""
    preset: str = "auto"
    """tiny, shakespeare, gpt2, gpt2-medium, gpt2-large, gpt2-xl; auto: gpt2 on a GPU, else tiny."""
    checkpoint: Path | None = None
    """With generate: folder of a run of `fuseline train gpt`, for its model in the place of a preset's; each
    rung then shows its perplexity on the text held out."""
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
    """cumulative: slot by slot, keeping what pays; alone: each rung upon plain PyTorch; combination: named
    sets."""
    rungs: tuple[str, ...] = ()
    """Rungs, slots (precision, attention, ...) or combinations (seed-001, seed-003, anchors) to run,
    separated by spaces or commas. All rungs if none is named."""
    budget: Annotated[str | None, tyro.conf.arg(metavar="MINUTES")] = None
    """Time for the whole ladder: 4, 90s, 1.5h or none. Rungs it does not reach are listed; a first build of
    the kernels does not count. Default: 3 minutes on a processor (5 with --model), 8 on a GPU."""
    steps: int = 20
    """Most steps in a timed run; fewer where the budget asks for it."""
    runs: int = 5
    """Timed runs of each rung, each in turn with one of the rung it is compared with."""
    resume: bool = False
    """Go on from the records in the output folder: rungs on record for this machine are not run again."""
    max_batch: str = "kept"
    """Largest batches (GPU only): none; fit: predicted from two sizes; kept: tried out, in a process of its
    own, for the eager rungs that were kept and the fastest rung; all: tried out for every rung."""

    def budget_seconds(self, device: str) -> float | None:
        """What --budget says, or the default for such a device."""
        from fuseline.bench.ladder.budget import parse_duration

        usual = DEFAULT_BUDGET if self.model is None else MODEL_BUDGET
        return parse_duration(self.budget or usual[device.partition(":")[0]])
