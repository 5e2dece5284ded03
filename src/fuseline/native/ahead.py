"""The libraries, built ahead of time with the same recipes as at first use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fuseline.errors import InputError
from fuseline.native.build import Recipe, build
from fuseline.native.compilers import Compiler, Search, find_cxx, find_nvcc
from fuseline.native.recipes import direct_recipe, kernels_recipe, majors_here, torch_recipe


@dataclass(frozen=True)
class Plan:
    """What will be built, by library name, and the nvcc that compiles kernels."""

    recipes: dict[str, Recipe]
    nvcc: Compiler | None


def plan(*, torch_library: bool = True, kernels: bool = True, elsewhere: bool = False) -> Plan:
    """The recipes for the libraries asked for: for this machine's GPUs, or `elsewhere` (and where there is
    none) for all. Raises InputError if a compiler is missing."""
    cxx = _required(find_cxx())
    nvcc = _required(find_nvcc(), " (`fuseline build --torch-only` goes without it.)") if kernels else None
    recipes = [torch_recipe(cxx)] if torch_library else []
    if torch_library and (direct := direct_recipe(cxx)) is not None:
        recipes.append(direct)
    if nvcc is not None:
        recipes.append(kernels_recipe(nvcc, cxx, () if elsewhere else majors_here()))
    return Plan({recipe.name: recipe for recipe in recipes}, nvcc)


def build_ahead(planned: Plan) -> dict[str, Path]:
    """Build what is planned into the cache. Returns the files by library name."""
    return {name: build(recipe) for name, recipe in planned.recipes.items()}


def _required(search: Search, otherwise: str = "") -> Compiler:
    if search.compiler is None:
        raise InputError(f"Nothing was built: {search.reason}. {search.mend}{otherwise}")
    return search.compiler
