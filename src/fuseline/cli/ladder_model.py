"""`fuseline ladder --model`: what is climbed is a model of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fuseline.cli.ladder_options import Options
from fuseline.cli.names import split_names, without_folders
from fuseline.cli.options import resolve_device
from fuseline.errors import InputError

if TYPE_CHECKING:
    from fuseline.bench.ladder import ModelSettings
    from fuseline.profiling.user_code import Work

DEFAULT_OUT = Path("fuseline-ladder-model")
BATCH_SIZE, SEQLEN = 4, 512
OF_PRESETS = ("workload", "preset", "checkpoint", "data", "tokenizer", "max_batch")


def settings(options: Options) -> ModelSettings:
    """Load the model, and check what was asked of it. `InputError` for options that presets alone have."""
    from fuseline.bench.ladder import ModelSettings

    assert options.model is not None
    usual = Options()
    for name in OF_PRESETS:
        if getattr(options, name) != getattr(usual, name):
            raise InputError(f"--{name.replace('_', '-')} is for presets: leave it out beside --model.")
    device = resolve_device(options.device)
    return ModelSettings(
        preset=without_folders(options.model),
        device=device,
        out=options.out or DEFAULT_OUT,
        seed=options.seed,
        mode=options.mode,
        rungs=split_names(options.rungs),
        budget_seconds=options.budget_seconds(device),
        steps=options.steps,
        runs=options.runs,
        resume=options.resume,
        max_batch="none",
        max_autotune=options.max_autotune,
        work=_load(options),
    )


def _load(options: Options) -> Work:
    import torch

    from fuseline.profiling import user_code
    from fuseline.profiling.hugging_face import load_folder

    assert options.model is not None
    if not Path(options.model).is_dir():
        for name, value in (("batch-size", options.batch_size), ("seqlen", options.seqlen)):
            if value is not None:
                raise InputError(f"--{name} is for folders; the function that makes the batch decides.")
        return user_code.load(options.model)
    batch_size = BATCH_SIZE if options.batch_size is None else options.batch_size
    seqlen = SEQLEN if options.seqlen is None else options.seqlen
    return load_folder(
        Path(options.model), batch_size=batch_size, seqlen=seqlen, dtype=torch.float32, train=True
    )
