"""A wheel with the libraries inside, for machines that have no compiler.

The wheel is built from a copy of the source tree through setuptools. The kernels in it serve every torch;
the other library serves the torch release it was built against, and a machine with another one builds its
own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fuseline.errors import InputError
from fuseline.native.compilers import Compiler, toolkit_version
from fuseline.native.direct_calls import python_abi
from fuseline.native.library import MANIFEST, public_torch_version
from fuseline.native.seals import seal

SOURCE = Path(__file__).parents[3]
COPIED = ("pyproject.toml", "README.md", "LICENSE", "src")
SETUP = '''\
"""The wheel holds machine code: it is for this platform, and for any Python."""
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class WithLibraries(Distribution):
    def has_ext_modules(self):
        return True


setup(distclass=WithLibraries, cmdclass={"bdist_wheel": PlatformWheel})
'''


def build_wheel(libraries: dict[str, Path], nvcc: Compiler | None, out: Path) -> Path:
    """Write the wheel with `libraries` (name to file) into `out` and return its path."""
    if not (SOURCE / "pyproject.toml").is_file():
        raise InputError(
            "A wheel is built from Fuseline's source tree, and this Fuseline is installed without it. "
            "Run the command from a clone, installed with `pip install -e .`."
        )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as room:
        tree = Path(room) / "fuseline"
        _copy_source(tree)
        prebuilt = tree / "src" / "fuseline" / "native" / "prebuilt"
        prebuilt.mkdir()
        for name, library in libraries.items():
            seal(Path(shutil.copy2(library, prebuilt / f"lib{name}.so")))
        (prebuilt / MANIFEST).write_text(json.dumps(_manifest(nvcc), indent=1) + "\n")
        made = Path(room) / "made"
        command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(made)]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        wheels = list(made.glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            raise InputError(
                f"setuptools made no wheel (exit code {done.returncode}):\n{done.stdout}{done.stderr}\n"
                "It needs setuptools 77 or later: `pip install -U setuptools`."
            )
        return Path(shutil.move(str(wheels[0]), str(out / wheels[0].name)))


def _copy_source(tree: Path) -> None:
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "prebuilt")
    for name in COPIED:
        origin = SOURCE / name
        if origin.is_dir():
            shutil.copytree(origin, tree / name, ignore=ignored)
        elif origin.is_file():
            shutil.copy2(origin, tree / name)
    (tree / "setup.py").write_text(SETUP)


def _manifest(nvcc: Compiler | None) -> dict[str, str]:
    """What the libraries were built with; `Loader` reads it."""
    manifest = {"torch": public_torch_version(), "python": python_abi()}
    if nvcc is not None:
        manifest["toolkit"] = ".".join(map(str, toolkit_version(nvcc)))
    return manifest
