"""Find what Fuseline's ops can compute in a model of yours, prove and time it, and print what it gains.

This verb only reports; in your program, call fuseline.accelerate(model, batch). The model is
MODULE:FUNCTION, a function without arguments that returns (model, batch) or (model, batch, loss_fn), or a
Hugging Face folder with a config.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from fuseline.cli.options import Common, resolve_device
from fuseline.cli.precisions import checked
from fuseline.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from fuseline.acceleration import Acceleration


@dataclass(frozen=True)
class Options(Common):
    """The options of `fuseline accelerate`."""

    model: Annotated[str, tyro.conf.Positional] = ""
    """MODULE:FUNCTION (a module name or a .py file), or a Hugging Face folder."""
    level: tuple[str, ...] = field(default=("exact",))
    """What may change: exact (nothing but rounding), tf32; without training also fp8, int8, int4."""
    train: bool | None = None
    """True: prove and time forward and backward. False: the forward alone. By default as the model's mode
    says."""
    batch_size: int = 4
    """For a Hugging Face folder: sequences in the batch."""
    seqlen: int = 512
    """For a Hugging Face folder: tokens in a sequence."""
    precision: str = "fp32"
    """For a Hugging Face folder: the precision of the weights, fp32, bf16 or fp16."""
    only: tuple[str, ...] = ()
    """Look at these modules only: names, or patterns with stars."""
    skip: tuple[str, ...] = ()
    """Leave these modules out: names, or patterns with stars."""


def run(options: Options) -> int:
    from fuseline.acceleration import accelerate

    model, batch = _load(options)
    fast = accelerate(
        model,
        batch,
        train=options.train,
        levels=options.level,
        only=options.only,
        skip=options.skip,
        dry_run=options.dry_run,
    )
    print(json.dumps(as_json(fast)) if options.json else fast)
    return 0


def as_json(fast: Acceleration) -> dict[str, Any]:
    """The account as one object."""
    whole = None
    if fast.whole is not None:
        whole = {
            "time_us": fast.whole.swapped_us,
            "original_time_us": fast.whole.original_us,
            "ratio": asdict(fast.whole.ratio),
        }
    return {
        "sites": [{**asdict(site), "gain": site.gain} for site in fast.sites],
        "kept": len(fast.kept),
        "whole": whole,
        "notes": list(fast.notes),
    }


def _load(options: Options) -> tuple[nn.Module, Any]:
    import torch

    from fuseline.profiling import user_code
    from fuseline.profiling.hugging_face import load_folder

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

    if not options.model:
        raise InputError("Which model? Give MODULE:FUNCTION or a Hugging Face folder.")
    device = torch.device(resolve_device(options.device))
    if Path(options.model).is_dir():
        work = load_folder(
            Path(options.model),
            batch_size=options.batch_size,
            seqlen=options.seqlen,
            dtype=dtypes[checked(options.precision, dtypes)],
            train=options.train is not False,
        ).to(device)
    else:
        work = user_code.load(options.model).to(device)
    return work.model, work.batch(work.tensors)
