"""Ops as functions of positional arguments, in the order of their schemas, past torch.ops: a microsecond less
of the host's time a call (csrc/python/direct.cpp).

    if not is_dynamo_compiling():
        result = direct.softmax(x, dim, scale, causal, mask)
        if result is not None:
            return result

None says: go the way of torch.ops. So they all answer until `enable` has loaded the module, and for good
where it cannot be built. Nothing but time depends on it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fuseline.errors import InputError
from fuseline.native.build import build
from fuseline.native.compilers import find_cxx
from fuseline.native.recipes import DIRECT_NAME, direct_recipe
from fuseline.native.seals import is_whole

Call = Callable[..., Any]
PREBUILT = Path(__file__).parent / "prebuilt"


def _declines(*_: object) -> None:
    return None


class Direct:
    """The functions by the names of their ops, made when they are first asked for."""

    def __init__(self) -> None:
        self._module: ModuleType | None = None
        self._tried = False
        self._lock = threading.Lock()
        self.reason = "nothing has asked for it yet"

    def __getattr__(self, name: str) -> Call:
        if not self._tried or name.startswith("_"):
            return _declines
        call: Call = _declines if self._module is None else self._module.make(f"fuseline::{name}")
        setattr(self, name, call)
        return call

    def standing(self, *lists: list[Any]) -> tuple[bytes, bytes] | None:
        """What `acceleration.standing` asks of modules: where their tensors lie, and their modes. None: they
        are to be asked in Python."""
        return None if self._module is None else self._module.standing(*lists)

    def enable(self, device_type: str) -> None:
        """Take tensors of that type of device from now on: "cpu" or "cuda", whose ops are loaded."""
        with self._lock:
            if not self._tried:
                try:
                    self._module = _load()
                    self.reason = ""
                except (InputError, ImportError) as why:
                    self.reason = str(why)
                self._tried = True
            if self._module is not None and device_type in ("cpu", "cuda"):
                self._module.enable(device_type)


def _load() -> ModuleType:
    path = _prebuilt() or _built()
    loader = importlib.machinery.ExtensionFileLoader(DIRECT_NAME, str(path))
    spec = importlib.util.spec_from_file_location(DIRECT_NAME, loader.path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _prebuilt() -> Path | None:
    """The module inside the package, if this is a wheel with one for this Python and this torch."""
    path = PREBUILT / f"lib{DIRECT_NAME}.so"
    if not path.is_file() or not is_whole(path):
        return None
    manifest = json.loads((PREBUILT / "manifest.json").read_text())
    here = str(torch.__version__).partition("+")[0], python_abi()
    return path if (manifest.get("torch"), manifest.get("python")) == here else None


def _built() -> Path:
    compiler = find_cxx().compiler
    recipe = None if compiler is None else direct_recipe(compiler)
    if recipe is None:
        raise InputError("there is no C++ compiler, or Python's headers (python3-dev) are not installed")
    return build(recipe)


def python_abi() -> str:
    """Which Pythons take a module built here."""
    return str(sysconfig.get_config_var("SOABI"))


direct = Direct()
