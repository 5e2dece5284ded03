"""The kernels of a compiled library as they would run on a GPU: resources, bounds, occupancy."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fuseline.errors import InputError, unknown_name
from fuseline.inspection.cubin import Bounds, read_bounds
from fuseline.inspection.cuobjdump import Cuobjdump, Resources
from fuseline.inspection.gpus import Gpu
from fuseline.inspection.kernel_names import family, readable
from fuseline.inspection.occupancy import RESERVED, Occupancy, occupancy

# From here on the compiler counts what CUDA reserves of each block as static shared memory.
_COUNTS_RESERVED = 90


@dataclass(frozen=True)
class Kernel:
    """One kernel's machine code. `shared` is its static shared memory in bytes, without what CUDA
    reserves."""

    name: str
    resources: Resources
    bounds: Bounds

    @property
    def family(self) -> str:
        """The template that it is an instance of."""
        return family(self.name)

    @property
    def shared(self) -> int:
        counted = _number(self.resources.architecture) >= _COUNTS_RESERVED
        return max(0, self.resources.shared - RESERVED) if counted else self.resources.shared

    def occupancy(self, gpu: Gpu, *, threads: int | None = None, shared: int = 0) -> Occupancy | None:
        """With blocks of `threads` (default: the most that its launch bounds allow) and `shared` bytes of
        dynamic shared memory. None where no number of threads is known."""
        threads = threads or self.bounds.threads
        if threads is None:
            return None
        found = occupancy(
            gpu,
            threads=threads,
            registers=self.resources.registers,
            shared=self.shared + shared,
            barriers=self.bounds.barriers,
        )
        if threads > (self.bounds.threads or threads):
            return replace(found, limits={**found.limits, "launch bounds": 0})
        return found


@dataclass(frozen=True)
class Kernels:
    """The kernels of `library` that `gpu` would run, by name. `remark` says where the code is another
    GPU's."""

    library: Path
    gpu: Gpu
    kernels: tuple[Kernel, ...]
    remark: str = ""

    def matching(self, text: str) -> tuple[Kernel, ...]:
        """The one that is called `text`, mangled or not; else those with `text` in their name, else those
        with all of its words, whatever the case. Raises InputError where there are none."""
        wanted = text.lower()
        found = (
            [one for one in self.kernels if text in (one.name, one.resources.function)]
            or [one for one in self.kernels if wanted in one.name.lower()]
            or [one for one in self.kernels if all(word in one.name.lower() for word in wanted.split())]
        )
        if not found:
            raise unknown_name("kernel", text, sorted({one.family for one in self.kernels}))
        return tuple(found)


def read_kernels(tool: Cuobjdump, library: Path, gpu: Gpu) -> Kernels:
    """The library's kernels for `gpu`. Raises InputError where it has no code that `gpu`, or an older GPU
    than it, could run."""
    resources = tool.resources(library)
    code, remark = _code_for(gpu, {one.architecture for one in resources}, library)
    bounds = _bounds(tool, library)
    kernels = [
        Kernel(readable(one.function), one, bounds.get((one.architecture, one.function), Bounds()))
        for one in resources
        if one.architecture in code
    ]
    return Kernels(library, gpu, tuple(sorted(kernels, key=lambda kernel: kernel.name)), remark)


def _bounds(tool: Cuobjdump, library: Path) -> dict[tuple[str, str], Bounds]:
    """By architecture and mangled name."""
    bounds: dict[tuple[str, str], Bounds] = {}
    with tempfile.TemporaryDirectory(prefix="fuseline-inspect-") as folder:
        for cubin in tool.extract(library, Path(folder)):
            architecture = cubin.suffixes[-2].removeprefix(".")
            for function, found in read_bounds(cubin.read_bytes()).items():
                bounds[architecture, function] = found
    return bounds


def _code_for(gpu: Gpu, architectures: Iterable[str], library: Path) -> tuple[list[str], str]:
    """The architectures whose code `gpu` runs: those of its major capability that are not newer than it, with
    those for it alone (`sm_90a`). Where there are none, the driver compiles PTX for it, and the newest older
    code stands in, with a remark."""
    own = 10 * gpu.capability[0] + gpu.capability[1]
    known = sorted(architectures, key=lambda one: (_number(one), one))
    usable = [one for one in known if _number(one) == own or not one.endswith(("a", "f"))]
    same = [one for one in usable if _number(one) // 10 == gpu.capability[0] and _number(one) <= own]
    if same:
        newest = max(map(_number, same))
        return [one for one in same if _number(one) == newest], ""
    older = [one for one in usable if _number(one) < own]
    if not older:
        major, minor = gpu.capability
        raise InputError(
            f"{library} has machine code for {_listed(known)}, none that {gpu.name} runs. Build for it: "
            f"`fuseline build --kernels-only --arch {major}.{minor}`; --gpu names another."
        )
    newest = max(map(_number, older))
    stand_in = [one for one in older if _number(one) == newest]
    remark = (
        f"The library has no machine code for {gpu.name}. These are the kernels of {_listed(stand_in)} under "
        f"the limits of {gpu.name}; registers and memory of code compiled for it can differ."
    )
    return stand_in, remark


def _listed(architectures: Sequence[str]) -> str:
    return ", ".join(architectures) or "no GPU"


def _number(architecture: str) -> int:
    digits = re.search(r"\d+", architecture)
    return int(digits[0]) if digits else 0
