"""Every verb that writes, on a disk that is full at once or soon: one line, and nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuseline.cli.main import run
from fuseline.data.tokenizers import ByteBPETokenizer
from fuseline.errors import InputError
from fuseline.models.llama import Llama, preset
from fuseline.models.llama_hugging_face import save_llama
from fuseline.records import Environment, Record, append, read

KIB = 1024
DISK = 512 * KIB
HERE = Environment("Test CPU", None, None, "2.13.0", None, "0.1.0", "abc")
TINY = [
    *(
        "--num-layers",
        "1",
        "--num-heads",
        "2",
        "--embed-dim",
        "32",
        "--seqlen",
        "16",
        "--batch-size",
        "2",
    ),
    *("--eval-batches", "1", "--checkpoint-interval", "1", "--sample-interval", "0", "--device", "cpu"),
    *("--tokenizer", "char", "--execution", "eager", "--precision", "fp32"),
]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of half a MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, free: int) -> None:
    with (disk / "filler").open("wb") as file:
        file.write(bytes(max(0, os.statvfs(disk).f_bavail * 4096 - free)))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a verb that has no room."""
    assert run(list(arguments)) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.endswith("...")]
    assert len(said) == 1, said
    assert "No space left on device" in said[0] or "full" in said[0]
    return said[0]


def left(disk: Path) -> list[str]:
    return sorted(path.name for path in disk.rglob("*") if path.is_file() and path.name != "filler")


@pytest.mark.parametrize("free", [0, 8 * KIB, 40 * KIB])
def test_the_first_checkpoint(
    free: int, disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    fill(disk, free)
    said = refused(
        capsys, "train", "gpt", "--data", str(tmp_path / "text.txt"), "--out", str(disk / "run"), *TINY
    )
    assert "resume" not in said  # there is nothing to resume
    assert not {"latest.pt", "best.pt"} & set(left(disk))
    assert not [name for name in left(disk) if name.endswith(".partial")]


def test_a_later_checkpoint_and_the_metrics(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    train = ["train", "gpt", "--out", str(disk / "run")]
    assert run([*train, "--data", str(tmp_path / "text.txt"), *TINY, "--steps", "2"]) == 0
    before = (disk / "run" / "latest.pt").read_bytes()
    capsys.readouterr()
    fill(disk, 4 * KIB)
    refused(capsys, *train, "--resume", "--steps", "40", "--device", "cpu")
    assert (disk / "run" / "latest.pt").read_bytes() == before
    for line in (disk / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    (disk / "filler").unlink()
    assert run([*train, "--resume", "--steps", "3", "--device", "cpu"]) == 0


def test_records_are_added_whole_or_not_at_all(disk: Path) -> None:
    case = {"op": "softmax", "rows": 4, "n": 8}
    records = [replace(Record.of("ops", case, "time_us", 1.0 + i, HERE), n=i) for i in range(40)]
    append(disk / "ops.jsonl", records[:3])
    fill(disk, 0)
    with pytest.raises(InputError, match=r"No space left on device\. What was there before is unharmed"):
        append(disk / "ops.jsonl", records)
    assert read(disk / "ops.jsonl") == records[:3]
    (disk / "filler").unlink()
    append(disk / "ops.jsonl", records)
    assert read(disk / "ops.jsonl") == [*records[:3], *records]


def test_a_report(disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = {"op": "softmax", "rows": 4, "n": 8, "dtype": "fp32", "direction": "fw"}
    append(tmp_path / "ops.jsonl", [Record.of("ops", case, "time_us", 2.0, HERE)])
    fill(disk, 8 * KIB)
    refused(capsys, "report", str(tmp_path / "ops.jsonl"), "--out", str(disk / "page"))
    assert left(disk) == []


def test_a_saved_model(disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    save_llama(Llama(preset("llama-tiny")), tmp_path / "llama")
    ByteBPETokenizer.train(["a b c hello world " * 20], 300).save(tmp_path / "llama" / "tokenizer.json")
    model = ["generate", "--model", str(tmp_path / "llama"), "--device", "cpu", "--prompt-ids", "1,2"]
    fill(disk, 64 * KIB)
    refused(capsys, *model, "--quant", "int8", "--save", str(disk / "small"), "--max-new-tokens", "2")
    assert left(disk) == []


def test_translations(disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer and the first checkpoint of a training, too."""
    for language, word in (("de", "ein Satz"), ("en", "a sentence")):
        (tmp_path / f"a.{language}").write_text("".join(f"{word} {i}\n" for i in range(60)))
    shape = ["--num-layers", "1", "--num-heads", "2", "--embed-dim", "16", "--ffn-dim", "16"]
    data = ["--data", f"{tmp_path / 'a.de'},{tmp_path / 'a.en'}", "--vocab-size", "300"]
    fill(disk, 8 * KIB)
    refused(
        capsys, "train", "translate", *data, *shape, "--out", str(disk / "run"), "--device", "cpu",
        "--execution", "eager",
    )  # fmt: skip
    assert not [name for name in left(disk) if name.endswith((".pt", ".partial"))]
