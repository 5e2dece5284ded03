"""Find what Fuseline's ops can compute in a model of yours, prove and time it, and print what it gains.

This verb only reports; in your program, call fuseline.accelerate(model, batch). The model is
MODULE:FUNCTION, a function without arguments that returns (model, batch) or (model, batch, loss_fn), or a
Hugging Face folder with a config.json. In training, loss_fn(model, batch) runs.

--out FOLDER writes a page with the table and a chart of the gains, and the records."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from fuseline.cli.names import without_folders
from fuseline.cli.options import Recorded, resolve_device
from fuseline.cli.precisions import checked
from fuseline.errors import InputError

if TYPE_CHECKING:
    from fuseline.acceleration import Acceleration
    from fuseline.acceleration.site import Site
    from fuseline.profiling.user_code import Work

INSIDE = "model."
"""Prefix of the names of the model's modules, if the model and its loss are one module."""


@dataclass(frozen=True)
class Options(Recorded):
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
    work = _load(options)
    fast = _accelerated(work, options)
    page = None
    if options.out is not None and not options.dry_run:
        from fuseline.report.acceleration import save

        name = f"{type(work.model).__name__} of {without_folders(options.model)}"
        page = save(fast, name, options.out)
    if options.json:
        print(json.dumps({**as_json(fast), "page": page and str(page)}))
        return 0
    print(fast)
    if options.out is not None:
        print(f"\nPage: {page}" if page else f"\nWould write a page to {options.out}.")
    return 0


def _accelerated(work: Work, options: Options) -> Acceleration:
    """As the model will run: in training with its loss. Its modules are named as in the model."""
    from fuseline.acceleration import accelerate
    from fuseline.acceleration.find import check_names
    from fuseline.profiling.user_code import WithLoss

    train = work.model.training if options.train is None else options.train
    model, batch = work.model, work.batch(work.tensors)
    if train:
        model, batch = WithLoss(work, work.model).called(work.tensors)
    inside = "" if model is work.model else INSIDE
    check_names(work.model, options.only, "only")
    check_names(work.model, options.skip, "skip")
    fast = accelerate(
        model,
        batch,
        train=train,
        levels=options.level,
        only=[inside + name for name in options.only],
        skip=[inside + name for name in options.skip],
        dry_run=options.dry_run,
    )
    if inside:
        fast.sites = tuple(map(named_as_in_the_model, fast.sites))
    return fast


def named_as_in_the_model(site: Site) -> Site:
    """The site of a model that is one module with its loss, as a site of the model alone."""
    return replace(
        site,
        path=site.path.removeprefix(INSIDE),
        also=tuple(path.removeprefix(INSIDE) for path in site.also),
        reason=re.sub(rf"(?<![\w.]){re.escape(INSIDE)}(?=\w)", "", site.reason),
    )


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


def _load(options: Options) -> Work:
    import torch

    from fuseline.profiling import user_code
    from fuseline.profiling.hugging_face import load_folder

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

    if not options.model:
        raise InputError("Which model? Give MODULE:FUNCTION or a Hugging Face folder.")
    device = torch.device(resolve_device(options.device))
    if Path(options.model).is_dir():
        return load_folder(
            Path(options.model),
            batch_size=options.batch_size,
            seqlen=options.seqlen,
            dtype=dtypes[checked(options.precision, dtypes)],
            train=options.train is not False,
        ).to(device)
    return user_code.load(options.model).to(device)
