"""cuobjdump, NVIDIA's reader of compiled CUDA code: found, run, and what it prints of resources, SASS and
PTX."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fuseline.errors import InputError
from fuseline.native.compilers import find_nvcc, toolkit_folders

MEND = (
    "Install the CUDA toolkit, or `pip install 'fuseline[inspect]'`, or name a toolkit's folder in "
    "$CUDA_HOME."
)

_ARCHITECTURE = re.compile(r"arch = (sm_\w+)")
_FUNCTION = re.compile(r"\s*Function (\S+):")
_FIELD = re.compile(r"(\w+)(?:\[\d+\])?:(\d+)")
_CODE = re.compile(r"\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_OPERATION = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


@dataclass(frozen=True)
class Resources:
    """What a kernel of one architecture (`sm_90`) takes: registers and bytes of local memory a thread
    (`local`: spilled registers, and arrays that are indexed at run time), bytes of static shared memory a
    block as the compiler counts them, bytes of constants, kernel parameters among them."""

    function: str
    architecture: str
    registers: int
    local: int
    shared: int
    constants: int


class Cuobjdump:
    """The tool in the folder of its program. Raises `InputError` where it refuses a file."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def resources(self, library: Path) -> list[Resources]:
        """Of every kernel in the library, in the file's order, one each for an architecture and a name."""
        return list(parse_resources(self._run("-res-usage", library).splitlines()))

    def extract(self, library: Path, folder: Path) -> list[Path]:
        """The machine code of the library as ELF files in `folder`."""
        self._run("-xelf", library, "all", cwd=folder)
        return sorted(folder.glob("*.cubin"))

    def sass(self, library: Path, architecture: str, function: str) -> list[str]:
        """The instructions of a kernel, an offset and an instruction a line."""
        if shutil.which("nvdisasm", path=self._path()) is None:
            raise InputError(
                f"SASS is read by nvdisasm, which is not beside {self.program} or on PATH. {MEND}"
            )
        found = self._run("-sass", library, "-arch", architecture, "-fun", function)
        return parse_sass(found.splitlines(), function)

    def ptx(self, library: Path, function: str) -> str:
        """The PTX of a kernel with the PTX file's head; nothing where the library holds no PTX of it."""
        return ptx_of(self._run("-ptx", library), function)

    def _path(self) -> str:
        return os.pathsep.join((str(self.program.parent), os.environ.get("PATH", "")))

    def _run(self, what: str, library: Path, *rest: str, cwd: Path | None = None) -> str:
        words = [str(self.program), what, *rest, str(library.absolute())]
        environment = {**os.environ, "PATH": self._path()}
        done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environment)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise InputError(
                f"{self.program} could not read {library}: {said[-1] if said else 'no reason given'}"
            )
        return done.stdout


def find_cuobjdump() -> Cuobjdump:
    """Beside nvcc, else on PATH, in /usr/local/cuda or in the pip wheels. Raises InputError where there is
    none."""
    nvcc = find_nvcc().compiler
    beside = [] if nvcc is None else [Path(nvcc.path).resolve().parent]
    folders = [*beside, *toolkit_folders()]
    places = os.pathsep.join((*map(str, folders), os.environ.get("PATH", "")))
    found = shutil.which("cuobjdump", path=places)
    if found is None:
        looked = ", ".join(map(str, dict.fromkeys(folders)))
        raise InputError(f"There is no cuobjdump here, which reads compiled kernels ({looked}, PATH). {MEND}")
    return Cuobjdump(Path(found))


def parse_resources(lines: Iterable[str]) -> Iterator[Resources]:
    """From `cuobjdump -res-usage`. A template that several sources instantiate is in the library several
    times, the same each time; it comes once."""
    architecture = function = ""
    seen: set[tuple[str, str]] = set()
    for line in lines:
        if found := _ARCHITECTURE.match(line):
            architecture = found[1]
        elif found := _FUNCTION.match(line):
            function = found[1]
        elif "REG:" in line and (architecture, function) not in seen:
            seen.add((architecture, function))
            fields = Counter[str]()
            for name, number in _FIELD.findall(line):
                fields[name] += int(number)
            local = fields["STACK"] + fields["LOCAL"]
            yield Resources(
                function, architecture, fields["REG"], local, fields["SHARED"], fields["CONSTANT"]
            )


def parse_sass(lines: Iterable[str], function: str) -> list[str]:
    """The instructions of `function` out of `cuobjdump -sass`, without their encodings."""
    instructions: list[str] = []
    inside = False
    for line in lines:
        if found := _CODE.match(line):
            if instructions:
                break  # the same again, out of another source
            inside = found[1] == function
        elif inside and (found := _INSTRUCTION.match(line)):
            instructions.append(f"{found[1]}  {found[2]}")
    while instructions and instructions[-1].endswith("  NOP"):  # to the end of a line of the cache
        instructions.pop()
    return instructions


def operations(sass: Iterable[str]) -> Counter[str]:
    """How many instructions of each kind (`FFMA`, `LDG`) the lines of `parse_sass` hold."""
    found = (_OPERATION.match(line.partition("  ")[2]) for line in sass)
    return Counter(one[1].partition(".")[0] for one in found if one)


def ptx_of(text: str, function: str) -> str:
    """The entry of `function` out of `cuobjdump -ptx`, after the head of its file."""
    start = re.search(rf"^\.(?:visible|weak) \.entry {re.escape(function)}\($", text, re.MULTILINE)
    if start is None:
        return ""
    head = [line for line in text[: start.start()].splitlines() if line.startswith((".version", ".target"))]
    end = text.index("\n}", start.start()) + 2
    return "\n".join((*head[-2:], "", text[start.start() : end]))
