"""Folders of Hugging Face's format: a `config.json`, and weights as safetensors, whole or in shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fuseline.errors import InputError, first_line
from fuseline.files.reading import MIB, is_there, regular_size
from fuseline.files.schema import checked_values, read_object
from fuseline.models.hugging_face_schema import EndsSaid, IndexSaid

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION = "generation_config.json"


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, or the one file that `path` is."""
    if not path.is_dir():
        return [path]
    if is_there(path / WEIGHTS):
        return [path / WEIGHTS]
    if is_there(path / INDEX):
        index = checked_values(IndexSaid, {"weight_map": _weight_map(path / INDEX)}, str(path / INDEX))
        # Names only: an index must not lead out of its folder.
        return sorted({path / Path(shard).name for shard in index.weight_map.values()})
    hint = ""
    if is_there(path / "pytorch_model.bin"):
        hint = " Its pytorch_model.bin is a pickle; save the model anew with transformers to get safetensors."
    raise InputError(f"There is neither {WEIGHTS} nor {INDEX} in {path}.{hint}")


def each_weight(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and weights one by one, so that no more than one is held beside the model they go to."""
    for file in weight_files(path):
        regular_size(file)  # a pipe would be waited for
        try:
            with safe_open(file, framework="pt", device="cpu") as weights:
                for name in weights.keys():  # noqa: SIM118 - the handle is no mapping
                    yield name, weights.get_tensor(name)
        except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise InputError(
                f"Cannot read {file}: {first_line(error)[:200]}. It is missing, cut off, or not a "
                "safetensors file."
            ) from error


def check_size(path: Path, weights: int) -> None:
    """`InputError` if the files at `path` cannot hold so many weights, were each one byte: known before
    anything is allocated for them."""
    held = sum(map(regular_size, weight_files(path)))
    if weights > held:
        raise InputError(
            f"{path}: its config describes {weights:,} weights or more, and its files have {held:,} bytes. "
            "They were cut off, or the files and the config do not belong together."
        )


def stop_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a text: of `generation_config.json` if it says some, as transformers reads them, else
    of `config.json`."""
    for name in (GENERATION, CONFIG):
        file = folder / name
        if is_there(file):
            said = read_config_file(file)
            ids = checked_values(EndsSaid, {"eos_token_id": said.get("eos_token_id")}, str(file)).ids
            if ids:
                return ids
    return ()


def read_config_file(path: Path) -> dict[str, Any]:
    """The object in a file of configuration, which is never large; `InputError` if there is none."""
    return read_object(path, 16 * MIB)


def _weight_map(path: Path) -> Any:
    index = read_object(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise InputError(f"{path} has no weight_map: it is not the index of a sharded model.")
    return index
