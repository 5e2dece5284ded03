"""Compile the native libraries ahead of time: for this machine into the cache, or into a wheel that needs no
compiler."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from fuseline.errors import InputError


@dataclass(frozen=True)
class Options:
    wheel: bool = False
    """Make a wheel with the libraries inside, for every GPU from the A100 on."""
    out: Path = Path("dist")
    """Folder for the wheel."""
    torch_only: bool = False
    """Build libfuseline_torch.so only, and the module that calls it from this Python."""
    kernels_only: bool = False
    """Build libfuseline_kernels.so only."""
    all_gpus: bool = False
    """Build the kernels for every GPU that they can serve, whatever this machine has."""
    arch: tuple[str, ...] = ()
    """Compute capabilities to build the kernels for, as in `--arch 8.0 9.0` (default: this machine's)."""
    json: bool = False
    """Print one JSON object; progress goes to stderr."""
    dry_run: bool = False
    """Say what would be built and with what, and build nothing."""


def run(options: Options) -> int:
    from fuseline.native.ahead import build_ahead, plan
    from fuseline.native.wheel import build_wheel

    if options.torch_only and options.kernels_only:
        raise InputError(
            "--torch-only and --kernels-only exclude each other; leave both out for all libraries."
        )
    planned = plan(
        torch_library=not options.kernels_only,
        kernels=not options.torch_only,
        all_gpus=options.all_gpus or (options.wheel and not options.arch and not options.torch_only),
        arch=options.arch,
    )
    if planned.without_kernels:
        print(f"fuseline: no CUDA kernels are built. {planned.without_kernels}", file=sys.stderr)
    if options.dry_run:
        _print(options, {name: str(recipe.path()) for name, recipe in planned.recipes.items()}, "would build")
        return 0
    built = build_ahead(planned)
    answer = {name: str(path) for name, path in built.items()}
    if options.wheel:
        answer["wheel"] = str(build_wheel(built, planned.nvcc, options.out))
    _print(options, answer, "built")
    return 0


def _print(options: Options, answer: dict[str, str], verb: str) -> None:
    if options.json:
        print(json.dumps(answer))
        return
    for name, path in answer.items():
        print(f"{verb} {name}: {path}")
