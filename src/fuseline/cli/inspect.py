"""Show what each compiled CUDA kernel needs: registers, shared, local and constant memory. Show how many of
its blocks fit on a multiprocessor, and which resource is the limit.

Without a name there is a line for each kernel template; with words of a name, a line for each instance. A
single instance is shown in full, with --sass its machine code, with --ptx its PTX.

Reads the library that `fuseline build` made, with cuobjdump of the CUDA toolkit. Needs no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fuseline.cli.inspect_tables import View, as_json, total
from fuseline.errors import InputError, unknown_name

if TYPE_CHECKING:
    from fuseline.inspection import Built, Cuobjdump, Kernel, Kernels

SORTS = ("name", "occupancy", "registers", "shared", "local")
MOST_THREADS = 1024
SHOWN = 8  # names of those that a word fits
OPERATIONS = 8  # kinds of instructions that are counted in the line above them
PIPE_WIDTH = 170


@dataclass(frozen=True)
class Options:
    kernel: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="KERNEL")] = ""
    """Words in the kernel's name (`norm`, `"softmax bf16"`), or the whole name."""
    gpu: str | None = None
    """The GPU whose limits count: sm_80, sm_86, sm_89, sm_90, sm_100, or a name such as A100 (default: this
    machine's, else sm_90)."""
    threads: int | None = None
    """Threads a block (default: the most that the kernel's launch bounds allow)."""
    shared: int = 0
    """Bytes of dynamic shared memory a block. The launchers choose them, so the library does not say."""
    sort: str = "name"
    """name, occupancy (lowest first), or registers, shared, local (highest first)."""
    sass: bool = False
    """Print the machine code of one kernel."""
    ptx: bool = False
    """Print the PTX of one kernel, where the library has PTX."""
    library: Path | None = None
    """Another library or object file with CUDA kernels in it (default: Fuseline's)."""
    json: bool = False
    """Print one JSON object."""


def run(options: Options) -> int:
    _check(options)
    from fuseline.inspection import choose_gpu, find_built, find_cuobjdump, read_kernels

    gpu = choose_gpu(options.gpu)
    built = find_built(options.library)
    tool = find_cuobjdump()
    known = read_kernels(tool, built.path, gpu)
    chosen = known.matching(options.kernel) if options.kernel else known.kernels
    if options.sass or options.ptx:
        kernel = _alone(chosen, "--sass" if options.sass else "--ptx")
        code = _sass(tool, built.path, kernel) if options.sass else _ptx(tool, built.path, kernel)
        print(json.dumps({"kernel": kernel.name, "code": code}) if options.json else code)
    elif options.json:
        print(json.dumps(as_json(known, chosen, threads=options.threads, shared=options.shared)))
    else:
        _print(known, chosen, built, options)
    return 0


def _check(options: Options) -> None:
    if options.sort not in SORTS:
        raise unknown_name("order", options.sort, SORTS)
    if options.threads is not None and not 1 <= options.threads <= MOST_THREADS:
        raise InputError(f"--threads {options.threads}: a block has 1 to {MOST_THREADS:,} threads.")
    if options.shared < 0:
        raise InputError(f"--shared {options.shared}: give 0 bytes or more.")
    if (options.sass or options.ptx) and not options.kernel:
        raise InputError(
            "--sass and --ptx print the code of one kernel: name it, as in `fuseline inspect NAME`."
        )
    if options.sass and options.ptx:
        raise InputError("--sass and --ptx are two things to print: give one of them.")


def _alone(chosen: Sequence[Kernel], flag: str) -> Kernel:
    if len(chosen) == 1:
        return chosen[0]
    shown = "\n".join(f"  {kernel.name}" for kernel in chosen[:SHOWN])
    more = f"\n  and {len(chosen) - SHOWN:,} more" if len(chosen) > SHOWN else ""
    raise InputError(
        f"{flag} prints one kernel, and {len(chosen):,} have that in their name. Add words, or give one's "
        f"whole name in quotes:\n{shown}{more}"
    )


def _sass(tool: Cuobjdump, library: Path, kernel: Kernel) -> str:
    """The instructions, and how many there are of the most frequent kinds."""
    from fuseline.inspection.cuobjdump import operations

    lines = tool.sass(library, kernel.resources.architecture, kernel.resources.function)
    counts = ", ".join(f"{number:,} {name}" for name, number in operations(lines).most_common(OPERATIONS))
    head = f"{kernel.name}, {kernel.resources.architecture}: {len(lines):,} instructions; {counts}"
    return "\n".join((head, *lines))


def _ptx(tool: Cuobjdump, library: Path, kernel: Kernel) -> str:
    text = tool.ptx(library, kernel.resources.function)
    if not text:
        raise InputError(
            f"{library} has no PTX of {kernel.name}: a library for GPUs that are here has machine code "
            "alone. `fuseline build --all-gpus` adds PTX; --sass prints the machine code."
        )
    return text


def _print(known: Kernels, chosen: Sequence[Kernel], built: Built, options: Options) -> None:
    from fuseline.cli.publishing import console

    out = console(PIPE_WIDTH)
    view = View(known.gpu, options.threads, options.shared)
    if len(chosen) == 1:
        print(view.card(chosen[0]))
    else:
        out.print(
            view.instances(chosen, options.sort) if options.kernel else view.families(chosen, options.sort)
        )
        print(total(chosen))
    print(f"\nLimits of {known.gpu.name} ({known.gpu.products}). Library: {built.path}")
    for remark in filter(
        None, (built.remark and f"It was {built.remark}.", known.remark, view.remark(chosen))
    ):
        print(remark)
