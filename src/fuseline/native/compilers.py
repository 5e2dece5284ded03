"""Where the compilers are: environment, PATH, the usual folders, and the pip wheels that carry nvcc."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

USUAL_TOOLKIT = Path("/usr/local/cuda/bin")
CXX_NAMES = ("g++", "c++", "clang++")
CXX_MEND = "Install g++ (Debian and Ubuntu: `apt-get install g++`), or name a compiler in $CXX."
NVCC_MEND = (
    "Install the CUDA toolkit, or `pip install 'fuseline[nvcc]'`, or name a toolkit's folder in $CUDA_HOME."
)


@dataclass(frozen=True)
class Compiler:
    """A compiler that answered when asked for its version."""

    command: tuple[str, ...]
    version: str
    found_by: str

    @property
    def path(self) -> str:
        return self.command[-1]

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version


@dataclass(frozen=True)
class Search:
    """What a search for a compiler came to: the compiler, or where it was looked for and what would mend
    it."""

    kind: str
    compiler: Compiler | None
    tried: tuple[str, ...]
    mend: str

    @property
    def reason(self) -> str:
        """Why there is none, in one sentence."""
        return f"no {self.kind} was found ({'; '.join(self.tried)})"


@dataclass(frozen=True)
class _Candidate:
    command: tuple[str, ...] | None
    found_by: str
    binding: bool = False
    """The user named this very compiler: if it does not work, no other is taken in its place."""


def find_cxx() -> Search:
    """The C++ compiler: `$CXX` if it is set, else g++, c++ or clang++ on PATH."""
    return _first_that_works("C++ compiler", _cxx_candidates(), CXX_MEND)


def find_nvcc() -> Search:
    """nvcc: `$CUDACXX`, `$CUDA_HOME` or `$CUDA_PATH`, PATH, /usr/local/cuda, then the pip wheels."""
    return _first_that_works("nvcc", _nvcc_candidates(), NVCC_MEND)


def compilers() -> dict[str, Search]:
    """Both searches, by the compiler's role."""
    return {"cxx": find_cxx(), "nvcc": find_nvcc()}


def toolkit_folders() -> list[Path]:
    """Where a CUDA toolkit's programs may be, other than on PATH; the folders need not be there."""
    named = [os.environ.get(variable, "").strip() for variable in ("CUDA_HOME", "CUDA_PATH")]
    return [*(Path(folder) / "bin" for folder in named if folder), USUAL_TOOLKIT, *_wheel_folders()]


def toolkit_version(nvcc: Compiler) -> tuple[int, int]:
    """The CUDA toolkit's (major, minor)."""
    match = re.search(r"release (\d+)\.(\d+)", nvcc.version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def toolkit_library_flags(nvcc: Compiler) -> tuple[str, ...]:
    """Where the static CUDA runtime is, if nvcc would not look there: the wheels keep it in `lib`."""
    lib = Path(nvcc.path).resolve().parent.parent / "lib"
    return (f"-L{lib}",) if (lib / "libcudart_static.a").is_file() else ()


def _cxx_candidates() -> Iterator[_Candidate]:
    if os.environ.get("CXX", "").strip():
        words = shlex.split(os.environ["CXX"])
        found = shutil.which(words[-1])
        yield _Candidate((*words[:-1], found) if found else None, f"$CXX={os.environ['CXX']}", binding=True)
    for name in CXX_NAMES:
        yield _on_path(name)


def _nvcc_candidates() -> Iterator[_Candidate]:
    if os.environ.get("CUDACXX", "").strip():
        found = shutil.which(os.environ["CUDACXX"])
        yield _Candidate((found,) if found else None, f"$CUDACXX={os.environ['CUDACXX']}", binding=True)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable, "").strip():
            yield _in_folder(Path(os.environ[variable]) / "bin", f"${variable}={os.environ[variable]}")
    yield _on_path("nvcc")
    yield _in_folder(USUAL_TOOLKIT, str(USUAL_TOOLKIT.parent))
    for folder in _wheel_folders():
        yield _in_folder(folder, f"the wheel in {folder.parent}")


def _wheel_folders() -> list[Path]:
    """`bin` folders of NVIDIA's wheels: one folder for the whole toolkit since CUDA 13, one a part before."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    return [
        place / part / "bin" for place in places for part in ("cu13", "cuda_nvcc") if (place / part).is_dir()
    ]


def _on_path(name: str) -> _Candidate:
    found = shutil.which(name)
    return _Candidate((found,) if found else None, f"{name} on PATH")


def _in_folder(folder: Path, found_by: str) -> _Candidate:
    found = shutil.which("nvcc", path=str(folder))
    return _Candidate((found,) if found else None, found_by)


def _first_that_works(kind: str, candidates: Iterator[_Candidate], mend: str) -> Search:
    tried: list[str] = []
    for candidate in candidates:
        if candidate.command is None:
            tried.append(f"{candidate.found_by}: not there")
        else:
            version = _version(candidate.command)
            if version is not None:
                return Search(
                    kind, Compiler(candidate.command, version, candidate.found_by), tuple(tried), mend
                )
            tried.append(f"{candidate.found_by}: does not run")
        if candidate.binding:
            break
    return Search(kind, None, tuple(tried), mend)


def _version(command: tuple[str, ...]) -> str | None:
    """What `--version` says, on one line; None if it does not run."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    release = [line for line in lines if "release" in line]
    return next(iter(release or lines), None)
