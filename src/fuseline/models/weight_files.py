"""Folders of Hugging Face's format: a `config.json`, and weights as safetensors, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fuseline.errors import InputError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, or the one file that `path` is."""
    if not path.is_dir():
        return [path]
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    if (path / INDEX).exists():
        index = read_json(path / INDEX).get("weight_map")
        if not isinstance(index, dict):
            raise InputError(f"{path / INDEX} has no weight_map: it is not the index of a sharded model.")
        # Names only: an index must not lead out of its folder.
        return sorted({path / Path(shard).name for shard in index.values()})
    hint = ""
    if (path / "pytorch_model.bin").exists():
        hint = " Its pytorch_model.bin is a pickle; save the model anew with transformers to get safetensors."
    raise InputError(f"There is neither {WEIGHTS} nor {INDEX} in {path}.{hint}")


def each_weight(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and weights one by one, so that no more than one is held beside the model they go to."""
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt", device="cpu") as weights:
                for name in weights.keys():  # noqa: SIM118 - the handle is no mapping
                    yield name, weights.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"Cannot read {file}: {error}. It is missing, cut off, or not a safetensors file."
            ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; `InputError` if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} does not hold a JSON object.")
    return value
