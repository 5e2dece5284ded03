"""The libraries, built ahead of time with the same recipes as at first use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fuseline.errors import InputError
from fuseline.native.build import Recipe, build
from fuseline.native.compilers import Compiler, Search, find_cxx, find_nvcc
from fuseline.native.recipes import (
    DIRECT_NAME,
    GENCODE_OF_MAJOR,
    TORCH_NAME,
    direct_recipe,
    kernels_recipe,
    majors_here,
    torch_recipe,
)

OLDEST_MAJOR = min(GENCODE_OF_MAJOR)


@dataclass(frozen=True)
class Plan:
    """What will be built, by library name, the nvcc that compiles kernels, and why kernels are left out."""

    recipes: dict[str, Recipe]
    nvcc: Compiler | None
    without_kernels: str = ""


def plan(
    *, torch_library: bool = True, kernels: bool = True, all_gpus: bool = False, arch: Sequence[str] = ()
) -> Plan:
    """The recipes for the libraries asked for: kernels for this machine's GPUs, for those of the compute
    capabilities in `arch`, or for `all_gpus`; none where nothing asks for them and there is no GPU.

    Raises InputError if a compiler is missing, or `arch` names what the kernels are not made for.
    """
    majors = _majors(arch)
    if all_gpus and majors:
        raise InputError("--all-gpus and --arch exclude each other; leave one of them out.")
    if not kernels and (all_gpus or majors):
        raise InputError("--torch-only builds no kernels; leave it out, or --all-gpus and --arch.")
    majors = majors or (() if all_gpus or not kernels else majors_here())
    without = ""
    if kernels and not majors and not all_gpus:
        without = "This machine has no GPU; `--all-gpus` builds kernels for others, `--arch 9.0` for some."
        if not torch_library:
            raise InputError(f"Nothing to build: {without}")
    cxx = _required(find_cxx())
    nvcc = None
    if kernels and not without:
        nvcc = _required(find_nvcc(), " (`fuseline build --torch-only` goes without it.)")
    recipes = [torch_recipe(cxx)] if torch_library else []
    if torch_library and (direct := direct_recipe(cxx)) is not None:
        recipes.append(direct)
    if nvcc is not None:
        recipes.append(kernels_recipe(nvcc, cxx, majors))
    return Plan({recipe.name: recipe for recipe in recipes}, nvcc, without)


def build_ahead(planned: Plan) -> dict[str, Path]:
    """Build what is planned into the cache. Returns the files by library name."""
    beside = [recipe for name, recipe in planned.recipes.items() if name == DIRECT_NAME]
    return {
        name: build(recipe, beside if name == TORCH_NAME else ()) for name, recipe in planned.recipes.items()
    }


def _majors(arch: Sequence[str]) -> tuple[int, ...]:
    """Major compute capabilities out of `9.0`, `90`, `sm_90` and the like."""
    majors = []
    for text in arch:
        match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)a?", text)
        if match is None or int(match[1]) < OLDEST_MAJOR:
            raise InputError(
                f"--arch {text}: give compute capabilities from {OLDEST_MAJOR}.0 (A100) on, as in "
                "`--arch 8.0 9.0`."
            )
        majors.append(int(match[1]))
    return tuple(sorted(set(majors)))


def _required(search: Search, otherwise: str = "") -> Compiler:
    if search.compiler is None:
        raise InputError(f"Nothing was built: {search.reason}. {search.mend}{otherwise}")
    return search.compiler
