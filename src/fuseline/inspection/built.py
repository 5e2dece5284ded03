"""The kernel library that is there to be read. Nothing is built or loaded for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuseline.errors import InputError
from fuseline.native.cache import cache_dir
from fuseline.native.compilers import find_cxx, find_nvcc
from fuseline.native.library import PREBUILT
from fuseline.native.recipes import GENCODE_OF_MAJOR, KERNELS_NAME, kernels_recipe, majors_here
from fuseline.native.seals import is_whole

FILE = f"lib{KERNELS_NAME}.so"


@dataclass(frozen=True)
class Built:
    """A compiled library. `remark` says what may differ from what runs here; mostly nothing."""

    path: Path
    remark: str = ""


def find_built(named: Path | None = None) -> Built:
    """The library at `named`; else that of `$FUSELINE_KERNELS_LIBRARY`, of the wheel, of these sources for
    this machine in the cache, or the newest in the cache. Raises InputError where there is none."""
    if named is not None:
        if not named.is_file():
            raise InputError(
                f"There is no file {named}. Name a library or an object file with CUDA kernels in it."
            )
        return Built(named)
    found = next(_candidates(), None)
    if found is None:
        raise InputError(
            f"No kernel library is built: {cache_dir() / 'lib'} has none. `fuseline build` compiles it for "
            "this machine's GPUs, `fuseline build --kernels-only --arch 9.0` for an H100 on any machine with "
            "nvcc (minutes); --library names another file."
        )
    return found


def _candidates() -> Iterator[Built]:
    if given := os.environ.get("FUSELINE_KERNELS_LIBRARY"):
        yield find_built(Path(given))
    if is_whole(PREBUILT / FILE):
        yield Built(PREBUILT / FILE)
    cached = [path for path in cache_dir().glob(f"lib/{KERNELS_NAME}-*/{FILE}") if is_whole(path)]
    of_these_sources = [path for path in _of_these_sources() if path in cached]
    yield from map(Built, of_these_sources)
    if cached:
        newest = max(cached, key=lambda path: path.stat().st_mtime)
        yield Built(newest, "built from other sources than these, or by another compiler")


def _of_these_sources() -> list[Path]:
    """For this machine's GPUs, for every GPU, for those of one generation."""
    nvcc, cxx = find_nvcc().compiler, find_cxx().compiler
    if nvcc is None or cxx is None:
        return []
    targets = dict.fromkeys((majors_here(), (), *((major,) for major in GENCODE_OF_MAJOR)))
    return [kernels_recipe(nvcc, cxx, majors).path() for majors in targets]
