"""What torch.compile does to a small model, step by step: the graph that TorchDynamo captures and its guards,
AOTAutograd's joint, forward and backward graphs, the code that TorchInductor generates (C++ on a processor,
Triton on a GPU) with what it fused, and, on a GPU, the PTX of one kernel.

Prints all of it, and writes it as a page. Take a small model: a large one has long graphs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.errors import InputError, unknown_name

if TYPE_CHECKING:
    from fuseline.profiling.lowering import Lowered
    from fuseline.profiling.user_code import Work

DEFAULT_OUT = Path("fuseline-compile-steps")


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")] = "norm"
    """norm (LayerNorm of GELU(x + bias) with a residual), sines, mlp, or MODULE:FUNCTION, a function that
    returns (model, batch) or (model, batch, loss_fn)."""
    forward: bool = False
    """The forward pass alone, without gradients."""


def run(options: Options) -> int:
    import torch

    device = torch.device(resolve_device(options.device))
    out = options.out or DEFAULT_OUT
    torch.manual_seed(options.seed)
    work = _work(options.target)
    if options.dry_run:
        return _planned(options, out)
    from fuseline.profiling.lowering import lower
    from fuseline.report.lowering import save

    name = options.target.rpartition(":")[2]
    lowered = lower(work, device, name=name, backward=not options.forward)
    if not lowered.stages:
        raise InputError(
            f"torch.compile captured nothing of {options.target}: its forward calls no torch operation that "
            "can be compiled, or is marked with torch.compiler.disable."
        )
    page = save(lowered, out)
    if options.json:
        print(json.dumps({**_as_json(lowered), "page": str(page)}))
    else:
        print(f"{lowered}\n\nPage: {page}")
    return 0


def _work(target: str) -> Work:
    from fuseline.profiling import user_code
    from fuseline.profiling.small_models import MODELS

    if ":" in target:
        return user_code.load(target)
    if target not in MODELS:
        raise InputError(
            f"{unknown_name('small model', target, MODELS)} A model of your own is named MODULE:FUNCTION."
        )
    return MODELS[target]()


def _planned(options: Options, out: Path) -> int:
    if options.json:
        print(json.dumps({"target": options.target, "forward": options.forward, "out": str(out)}))
    else:
        passes = "forward" if options.forward else "forward and backward"
        print(f"{options.target}: compile {passes}, stage by stage. The page would go to {out}.")
    return 0


def _as_json(lowered: Lowered) -> dict[str, object]:
    return {
        "model": lowered.name,
        "device": lowered.device,
        "seconds": lowered.seconds,
        "stages": [
            {"stage": one.key, "operations": one.operations, "text": one.text} for one in lowered.stages
        ],
        "kernels": [{"kernel": one.kernel, "operations": one.operations} for one in lowered.fusions],
        "graph_breaks": [{"place": one.place, "reason": one.reason} for one in lowered.graph_breaks],
    }
