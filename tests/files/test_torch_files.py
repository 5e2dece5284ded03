from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.errors import InputError
from fuseline.files.torch_files import check_tensors, load_torch


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({"a": torch.arange(1000.0), "n": 3}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def test_a_flipped_byte_is_refused_by_name(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    at = content.index(torch.arange(1000.0).numpy().tobytes()[100:200])
    content[at] ^= 1
    saved.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"is damaged: 'data/0' does not match its checksum"):
        load_torch(saved, whole=True)
    assert load_torch(saved, whole=False)["n"] == 3  # its tensors are not looked at


def test_code_is_refused_without_torchs_advice(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save({"a": Trap()}, tmp_path / "x.pt")
    with pytest.raises(InputError) as caught:
        load_torch(tmp_path / "x.pt", whole=True)
    said = str(caught.value)
    assert "holds Python objects (posix.mkdir)" in said
    assert "weights_only" not in said
    assert "\n" not in said
    assert not (tmp_path / "trapped").exists()


def test_a_compressed_archive_is_refused(saved: Path) -> None:
    """A few kilobytes could stand for gigabytes of zeros."""
    with zipfile.ZipFile(saved) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    with zipfile.ZipFile(saved, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    with pytest.raises(InputError, match="is compressed"):
        load_torch(saved, whole=True)


@pytest.mark.parametrize(
    "tensor,message",
    [
        (torch.zeros(1).expand(2**20, 2**20), "does not hold so much"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.zeros(2, dtype=torch.int64), "int64"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        ("x", "not a tensor"),
    ],
)
def test_weights_are_dense_and_there(tensor: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_tensors({"w": tensor}, "x")
    check_tensors({"w": torch.zeros(2, 3).T}, "x")
