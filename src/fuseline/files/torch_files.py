"""Files that `torch.save` wrote, read so that nothing in them is executed and nothing is taken on trust.

Such a file is a zip archive of a pickle and of the tensors' bytes, each with its checksum (which torch
writes, and does not read).
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fuseline.errors import InputError, first_line
from fuseline.files.reading import open_regular
from fuseline.files.schema import shown
from fuseline.files.writing import cannot_write, partial_folder

_CHUNK = 2**22
_FOREIGN = re.compile(r"GLOBAL ([\w.]+)")


def load_torch(path: Path, *, whole: bool) -> dict[str, Any]:
    """The dictionary in a file of `torch.save`, its tensors on the CPU.

    `whole` reads the tensors and holds every part against its checksum; else they are left on the disk until
    somebody looks at them. Raises `InputError` for a file that is missing, cut off, damaged (naming the
    part), no file of torch's, or one that holds Python objects.
    """
    _check_archive(path, whole=whole)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=not whole)
    except Exception as error:  # a damaged pickle may raise anything
        raise InputError(f"Cannot read {path} as a PyTorch checkpoint: {_why(error)}") from error
    return content if isinstance(content, dict) else {}


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file: whole, or `InputError` and what was there before.

    The package writes to a temporary file of its own beside the one it is asked for, so that is in a folder
    that the next writer removes if this one is killed.
    """
    try:
        with partial_folder(path.parent) as room:
            save_file(tensors, room / path.name, metadata=metadata)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise cannot_write(path, error) from error


def check_tensors(tensors: Mapping[Any, Any], place: str, dtype: torch.dtype | None = None) -> None:
    """`InputError`, naming `place`, unless all values are dense tensors of `dtype` (None: of floating point)
    that the file really holds: a few bytes can claim to be a tensor of any size."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InputError(f"{place}: {shown(name)} names a {type(tensor).__name__}, not a tensor.")
        plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
        if not plain or not (tensor.is_floating_point() if dtype is None else tensor.dtype is dtype):
            kind = "on the meta device" if tensor.is_meta else f"{tensor.layout} of {tensor.dtype}"
            wanted = "a weight is a dense tensor of floating point" if dtype is None else f"not of {dtype}"
            raise InputError(f"{place}: {name} is {kind}; {wanted}.")
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise InputError(
                f"{place}: {name} claims to be {list(tensor.shape)}, and the file does not hold so much."
            )


def _check_archive(path: Path, *, whole: bool) -> None:
    with open_regular(path) as file:
        size = file.seek(0, 2)
        if not zipfile.is_zipfile(file):
            raise InputError(
                f"{path} is not a PyTorch checkpoint, or was cut off while it was written or copied."
            )
        name = "its list of parts"
        try:
            with zipfile.ZipFile(file) as archive:
                parts = archive.infolist()
                if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                    raise InputError(f"{path} is compressed, which no file of torch.save is.")
                if sum(part.file_size for part in parts) > size:
                    raise InputError(f"{path} claims to hold more bytes than it has: it is damaged.")
                for part in parts:
                    name = part.filename
                    if whole or name.endswith((".pkl", "version", "byteorder")):
                        with archive.open(part) as content:
                            while content.read(_CHUNK):
                                pass
        except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            part_name = shown(name.partition("/")[2] or name)
            raise InputError(
                f"{path} is damaged: {part_name} does not match its checksum. Take another copy of it."
            ) from error
        except (NotImplementedError, RuntimeError) as error:  # encrypted, or of a later zip
            raise InputError(f"{path} is no PyTorch checkpoint: {first_line(error)[:120]}.") from error


def _why(error: Exception) -> str:
    """In a line, and without torch's advice to execute what the file holds."""
    said = str(error)
    if "weights_only" in said or "Weights only" in said:
        found = _FOREIGN.search(said)
        what = f" ({found[1][:80]})" if found else ""
        return (
            f"it holds Python objects{what} beside tensors and plain values, and reading those could run "
            "code. Save the weights alone, as a state dict or in safetensors, with the program that made it."
        )
    return f"{first_line(error)[:200].rstrip('.')}."
