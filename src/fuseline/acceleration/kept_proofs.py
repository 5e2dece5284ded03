"""Proofs and times of earlier runs, one JSON file each, by what they are of: the trace with its shapes and
dtypes, how it was called, the recipes, the GPU and the versions of what computed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fuseline import native
from fuseline.version import __version__


@dataclass
class KeptRecipe:
    """What is known of one recipe: proved with these errors, or refused; timed, or not yet."""

    error: float = 0.0
    original_error: float = 0.0
    any_length: bool = True
    refused: str = ""
    time_us: float | None = None
    original_time_us: float | None = None
    pays: bool | None = None


@dataclass
class KeptProof:
    """Of every recipe of a match, in order, and why none was tried at all."""

    recipes: list[KeptRecipe] = field(default_factory=list)
    reason: str = ""


def proof_key(*parts: object) -> str:
    """A name for what a proof is of."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    loaded = native.ready("cuda" if torch.cuda.is_available() else "cpu")
    text = "\n".join(map(str, (*parts, device, torch.__version__, __version__, loaded, libraries())))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def libraries() -> tuple[str, ...]:
    """The names of the folders of the native libraries, which say what the libraries were built from."""
    status = native.status()
    return tuple(one.path.parent.name for one in (status.torch, status.kernels) if one.path is not None)


def folder() -> Path:
    return native.cache_dir() / "acceleration"


def load(key: str) -> KeptProof | None:
    """What is kept under that name; None for nothing, and for a file that is none of ours any more."""
    read = load_json(key)
    try:
        return None if read is None else KeptProof([KeptRecipe(**r) for r in read["recipes"]], read["reason"])
    except (KeyError, TypeError):
        return None


def keep(key: str, proof: KeptProof) -> None:
    """Keep a proof under that name."""
    keep_json(key, asdict(proof))


def load_json(key: str) -> dict[str, Any] | None:
    """The object that is kept under that name, or None."""
    try:
        read = json.loads((folder() / f"{key}.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return read if isinstance(read, dict) else None


def keep_json(key: str, kept: dict[str, Any]) -> None:
    """Put the file in place whole. A folder that cannot be written to only costs the next run its time."""
    with contextlib.suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder(), prefix=".", suffix=".json")
        with os.fdopen(handle, "w") as stream:
            json.dump(kept, stream)
        os.replace(temporary, folder() / f"{key}.json")
