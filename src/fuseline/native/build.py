"""Compile and link one library: objects in parallel, each cached by content, so that one edit recompiles
one file.

What is compiled and how is data (`Recipe`, made by `recipes.py` and `extension.py`); this file carries it
out, the same way just in time and ahead of time.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fuseline.errors import InputError
from fuseline.native.cache import cache_dir, content_key, make_once
from fuseline.native.compilers import Compiler
from fuseline.native.progress import Progress, progress

OUTPUT_LINES = 60


class BuildError(InputError):
    """A compiler refused: its command, its output, and what to do."""


@dataclass(frozen=True)
class Unit:
    """One source file, compiled one way. `depends` are the headers it reads; `identity` is what else
    decides the object: versions of compilers and of libraries whose headers are not hashed."""

    source: Path
    compiler: Compiler
    flags: tuple[str, ...]
    depends: tuple[Path, ...]
    identity: tuple[str, ...]
    label: str
    cores: int = 1

    def key(self) -> str:
        texts = (self.compiler.version, *_without_places(self.flags), *self.identity, self.source.name)
        return content_key(texts, (self.source, *self.depends))


@dataclass(frozen=True)
class Recipe:
    """A library: its units, and the command that links their objects."""

    name: str
    units: tuple[Unit, ...]
    linker: Compiler
    link_flags: tuple[str, ...]

    def key(self) -> str:
        flags = _without_places(self.link_flags)
        return content_key((self.linker.version, *flags, *(u.key() for u in self.units)), ())

    def path(self) -> Path:
        """Where the library stands in the cache once it is built."""
        return cache_dir() / "lib" / f"{self.name}-{self.key()}" / f"lib{self.name}.so"


def build(recipe: Recipe) -> Path:
    """The library's path in the cache, built first if it is not there. Raises `BuildError` with the
    output."""

    def make(temporary: Path) -> None:
        missing = sum(not _object_path(unit).exists() for unit in recipe.units)
        with progress(f"lib{recipe.name}.so", missing) as line:
            objects = _compile_all(recipe.units, line)
            _run(
                [*recipe.linker.command, "-o", str(temporary), *map(str, objects), *recipe.link_flags],
                recipe.name,
            )

    def waiting() -> None:
        Progress(recipe.name, 0).say(f"another process is building lib{recipe.name}.so; waiting for it")

    return make_once(recipe.path(), make, waiting)


def _compile_all(units: Sequence[Unit], line: Progress) -> list[Path]:
    def compile_one(unit: Unit) -> Path:
        path = _object_path(unit)
        if path.exists():
            return path

        def make(temporary: Path) -> None:
            command = [*unit.compiler.command, *unit.flags, "-c", str(unit.source), "-o", str(temporary)]
            _run(command, unit.label)

        made = make_once(path, make)
        line.step(unit.label)
        return made

    cores = os.cpu_count() or 1
    workers = max(1, cores // max(unit.cores for unit in units))
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(compile_one, units))


def _object_path(unit: Unit) -> Path:
    return cache_dir() / "obj" / f"{unit.source.stem}-{unit.key()}.o"


def _run(command: list[str], label: str) -> None:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise BuildError(f"{label}: {command[0]} does not run ({error}).") from error
    if done.returncode != 0:
        lines = done.stdout.splitlines()
        kept = "\n".join(lines[:OUTPUT_LINES])
        more = f"\n... {len(lines) - OUTPUT_LINES} more lines" if len(lines) > OUTPUT_LINES else ""
        raise BuildError(
            f"{label} did not compile (exit code {done.returncode}). The command was\n  {' '.join(command)}\n"
            f"and it said\n{kept}{more}\n"
            "Mend the source if it is yours; otherwise `fuseline doctor` says which compilers were found."
        )


def _without_places(flags: Sequence[str]) -> list[str]:
    """Flags that decide the result; where headers and libraries lie on this machine does not."""
    return [flag for flag in flags if not flag.startswith(("-I", "-L", "-isystem"))]
