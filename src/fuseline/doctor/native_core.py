"""The native core: compilers, the libraries they made, and where those are kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fuseline import native
from fuseline.doctor.check import Check, State
from fuseline.native import LibraryStatus, NativeError, Search

COMPILERS = "Compilers"
GROUP = "Native core"
LEAST_FREE = 2 * 2**30  # a build takes some hundred MiB, a checkpoint of GPT-2 1.5 GiB
MIB, GIB = 2**20, 2**30


def unbuilt() -> list[str]:
    """The libraries that the first use here would compile; none where references were asked for."""
    return [] if os.environ.get("FUSELINE_NATIVE", "1") == "0" else native.unbuilt()


def checks(unbuilt: Sequence[str] = ()) -> Iterator[Check]:
    """Compilers, libraries and the cache. Where there are `unbuilt` libraries nothing is loaded, else what
    was never built is built now."""
    found = native.compilers()
    yield _compiler("C++", found["cxx"], missing="warn")
    # Without a GPU nothing would run what nvcc makes.
    yield _compiler("nvcc", found["nvcc"], missing="warn" if torch.cuda.is_available() else "absent")
    yield from (_unbuilt(name) for name in unbuilt) if unbuilt else _loaded()
    yield _cache(native.cache_dir())
    yield _disk(native.cache_dir())


def _unbuilt(name: str) -> Check:
    found = f"lib{name}.so is not built yet: the first use on this machine builds it"
    return Check(GROUP, name, "absent", found, "fuseline build, or fuseline doctor --build")


def _loaded() -> Iterator[Check]:
    try:
        native.load()
    except NativeError as error:
        yield Check(GROUP, "FUSELINE_STRICT", "bad", str(error), "fuseline build, or unset FUSELINE_STRICT")
    status = native.status()
    yield _library("operations", status.torch, missing="warn")
    yield _library("kernels", status.kernels, missing="warn" if torch.cuda.is_available() else "absent")
    yield _direct_calls()


def _compiler(name: str, search: Search, missing: State) -> Check:
    if search.compiler is None:
        return Check(COMPILERS, name, missing, search.reason, search.mend)
    compiler = search.compiler
    return Check(COMPILERS, name, "ok", f"{compiler.version}: {compiler.path}, found by {compiler.found_by}")


def _library(name: str, library: LibraryStatus, missing: State) -> Check:
    if library.loaded:
        return Check(GROUP, name, "ok", f"lib{library.name}.so from {library.path}")
    if missing == "absent":
        return Check(
            GROUP, name, missing, f"lib{library.name}.so is not loaded: there is no GPU to use it on"
        )
    mend = library.mend or "fuseline build"
    return Check(GROUP, name, missing, f"lib{library.name}.so is not loaded: {library.reason}", mend)


def _direct_calls() -> Check:
    """They save a microsecond a call; without them all runs the same."""
    if not native.direct.reason:
        return Check(GROUP, "direct calls", "ok", "ops are called past torch.ops")
    return Check(GROUP, "direct calls", "absent", f"calls go through torch.ops: {native.direct.reason}")


def _cache(folder: Path) -> Check:
    if not folder.exists():
        parent = next(p for p in folder.parents if p.exists())
        if _is_writable(parent):
            return Check(GROUP, "cache", "ok", f"{folder}, not there yet")
    elif _is_writable(folder):
        files = [f for f in folder.rglob("*") if f.is_file()]
        size = sum(f.stat().st_size for f in files) / MIB
        return Check(GROUP, "cache", "ok", f"{folder}, {len(files)} files, {size:.1f} MiB")
    mend = "export FUSELINE_CACHE=a folder that can be written"
    return Check(GROUP, "cache", "warn", f"{folder} cannot be written: nothing can be built", mend)


def _disk(folder: Path) -> Check:
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free at {place}"
    if free < LEAST_FREE:
        mend = "Free some space, or export FUSELINE_CACHE=a folder on a larger disk"
        return Check(GROUP, "disk", "warn", f"{found}: little", mend)
    return Check(GROUP, "disk", "ok", found)


def _is_writable(folder: Path) -> bool:
    """Asked by writing: what the permissions say can be wrong on mounted and read-only file systems."""
    probe = folder / ".fuseline-doctor"
    try:
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True
