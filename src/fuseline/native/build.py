"""Compile and link one library: objects in parallel, each cached by content, so that one edit recompiles
one file.

What is compiled and how is data (`Recipe`, made by `recipes.py` and `extension.py`); this file carries it
out, the same way just in time and ahead of time.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fuseline.errors import InputError
from fuseline.native.cache import cache_dir, content_key, make_sealed
from fuseline.native.compilers import Compiler
from fuseline.native.cores import compilers_at_once
from fuseline.native.progress import Progress, progress, say
from fuseline.native.seals import is_whole

OUTPUT_LINES = 60
LEAST_FREE = 2**20  # bytes; with fewer on the disk no object or library was ever written


class BuildError(InputError):
    """A compiler refused: its command, its output, and what to do."""


@dataclass(frozen=True)
class Unit:
    """One source file, compiled one way. `depends` are the headers it reads; `identity` is what else
    decides the object: versions of compilers and of libraries whose headers are not hashed. `before` are
    sources that the same run of the compiler reads before this one, as if it included them."""

    source: Path
    compiler: Compiler
    flags: tuple[str, ...]
    depends: tuple[Path, ...]
    identity: tuple[str, ...]
    label: str
    cores: int = 1
    before: tuple[Path, ...] = ()

    @property
    def sources(self) -> tuple[Path, ...]:
        return (*self.before, self.source)

    def key(self) -> str:
        return content_key(self.texts(), (*self.sources, *self.depends))

    def texts(self) -> list[str]:
        """What decides the object besides the content of files, a line for each source."""
        how = " ".join((self.compiler.version, *_without_places(self.flags), *self.identity))
        return [f"{how} {source.name}" for source in self.sources]

    def command(self, out: Path) -> list[str]:
        included = [word for source in self.before for word in ("-include", str(source))]
        return [*self.compiler.command, *self.flags, *included, "-c", str(self.source), "-o", str(out)]


@dataclass(frozen=True)
class Recipe:
    """A library: its units, and the command that links their objects."""

    name: str
    units: tuple[Unit, ...]
    linker: Compiler
    link_flags: tuple[str, ...]

    def key(self) -> str:
        """Of all that is compiled and how. Which sources are compiled together, which depends on the number
        of cores, does not count."""
        texts = sorted(text for unit in self.units for text in unit.texts())
        files = {file for unit in self.units for file in (*unit.sources, *unit.depends)}
        return content_key((self.linker.version, *_without_places(self.link_flags), *texts), files)

    def path(self) -> Path:
        """Where the library stands in the cache once it is built."""
        return cache_dir() / "lib" / f"{self.name}-{self.key()}" / f"lib{self.name}.so"


def build(recipe: Recipe, beside: Sequence[Recipe] = ()) -> Path:
    """The library's path in the cache, built first if it is not there. Raises `BuildError` with the
    output.

    The objects of `beside` are compiled in the same go, on cores that would be idle; those libraries are
    linked when they are built themselves.
    """

    def make(temporary: Path) -> None:
        others = [unit for other in beside for unit in other.units]
        missing = sum(not is_whole(_object_path(unit)) for unit in (*recipe.units, *others))
        with progress(f"lib{recipe.name}.so", missing) as line:
            objects = _compile_all(recipe.units, others, line)
            _run(
                [*recipe.linker.command, "-o", str(temporary), *map(str, objects), *recipe.link_flags],
                recipe.name,
                temporary.parent,
            )

    def waiting() -> None:
        say(f"another process is building lib{recipe.name}.so; waiting for it")

    return make_sealed(recipe.path(), make, waiting)


def _compile_all(units: Sequence[Unit], others: Sequence[Unit], line: Progress) -> list[Path]:
    """The objects of `units`, in their order. What does not compile among `others` is left to its own
    build, which then says so."""

    def compile_one(unit: Unit) -> Path:
        path = _object_path(unit)
        if is_whole(path):
            return path
        made = make_sealed(
            path, lambda temporary: _run(unit.command(temporary), unit.label, temporary.parent)
        )
        line.step(unit.label)
        return made

    workers = max(1, compilers_at_once() // max(unit.cores for unit in units))
    # What takes longest begins first: groups of sources, then single ones with torch's headers.
    order = [*(u for u in units if u.before), *others, *(u for u in units if not u.before)]
    with ThreadPoolExecutor(workers) as pool:
        compiled = {id(unit): pool.submit(compile_one, unit) for unit in order}
        try:
            return [compiled[id(unit)].result() for unit in units]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _object_path(unit: Unit) -> Path:
    return cache_dir() / "obj" / f"{unit.source.stem}-{unit.key()}.o"


def _run(command: list[str], label: str, room: Path) -> None:
    """Run a compiler, whose own temporary files lie in `room` and go with it."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": str(room)},
        )
    except OSError as error:
        raise BuildError(f"{label}: {command[0]} does not run ({error}).") from error
    if done.returncode != 0:
        if _is_full(room, done.stdout):
            raise BuildError(
                f"{label} was not built: the disk of {cache_dir()} is full. Free some space, or name another "
                "folder in $FUSELINE_CACHE."
            )
        lines = done.stdout.splitlines()
        kept = "\n".join(lines[:OUTPUT_LINES])
        more = f"\n... {len(lines) - OUTPUT_LINES} more lines" if len(lines) > OUTPUT_LINES else ""
        raise BuildError(
            f"{label} did not compile (exit code {done.returncode}). The command was\n  {' '.join(command)}\n"
            f"and it said\n{kept}{more}\n"
            "Mend the source if it is yours; otherwise `fuseline doctor` says which compilers were found."
        )


def _is_full(room: Path, said: str) -> bool:
    """Whether a compiler failed for want of space: it says so, or the linker died writing to its output."""
    return os.strerror(errno.ENOSPC) in said or shutil.disk_usage(room).free < LEAST_FREE


def _without_places(flags: Sequence[str]) -> list[str]:
    """Flags that decide the result; where headers and libraries lie on this machine does not."""
    return [flag for flag in flags if not flag.startswith(("-I", "-L", "-isystem"))]
