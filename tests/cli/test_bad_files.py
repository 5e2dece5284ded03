"""Model folders of bad will and bad luck: one line and exit code 2 for each, and soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuseline.cli.main import run
from fuseline.models.llama import Llama, preset
from fuseline.models.llama_hugging_face import save_llama

ASKED = ["--device", "cpu", "--prompt-ids", "1,2", "--max-new-tokens", "2"]
SOON_S = 5.0  # of processor time, on whatever machine: it takes a tenth of a second


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    save_llama(Llama(preset("llama-tiny")), folder)
    return folder


def copied(whole: Path, folder: Path) -> Path:
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    began = time.process_time()
    assert run(["generate", "--model", str(folder), *ASKED]) == 2
    assert time.process_time() - began < SOON_S
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if not line.endswith(" ...")]
    assert len(lines) == 1, said
    assert len(lines[0]) < 600
    return lines[0]


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"hidden_size": 1.5}, "hidden_size is 1.5"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": float("nan")}, "NaN, which is no number"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000"),
        ({"hidden_size": 2**24, "intermediate_size": 2**24}, "GiB on cpu"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings is 1000000000"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' lacks factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]"),
        ({"rope_theta": 0, "rope_parameters": None}, "rope_theta is 0"),
        ({"num_key_value_heads": 3}, "cannot share 3 heads"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"model_type": "x" * 10**6}, "model_type is 'xxx"),
        ({"layer_types": "x", "model_type": "qwen3", "use_sliding_window": True}, "layer_types is 'x'"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ],
)
def test_values_that_cannot_be(
    changes: dict[str, Any], message: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(whole, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert message in refused(folder, capsys)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
@pytest.mark.parametrize(
    "become,message",
    [
        (os.mkfifo, "is a pipe, not a file"),
        (lambda path: os.symlink("/dev/zero", path), "is a device, not a file"),
        (os.mkdir, "is a folder, not a file"),
        (lambda path: os.symlink(path, path), "symbolic links"),
    ],
)
def test_what_is_no_file(
    name: str,
    become: Callable[[Path], None],
    message: str,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copied(whole, tmp_path)
    (folder / name).unlink(missing_ok=True)
    become(folder / name)
    assert message in refused(folder, capsys)


@pytest.mark.parametrize(
    "text,message",
    [
        ("[" * 100_000, "nested"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested"),
        ("[1]", "does not hold a JSON object"),
        ("", "is not JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"hidden_size": 1e999}', "no number"),
    ],
)
def test_json_of_bad_will(
    text: str, message: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(whole, tmp_path)
    (folder / "config.json").write_text(text)
    assert message in refused(folder, capsys)


def test_bytes_that_are_no_text(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(whole, tmp_path)
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    assert "is not UTF-8 text: byte 7 is 0xff" in refused(folder, capsys)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_a_folder_that_may_not_be_read(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    copied(whole, folder)
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and path.is_relative_to("/tmp"):
            path.chmod(path.stat().st_mode | 0o001)
    folder.chmod(0o000)
    os.seteuid(65534)
    try:
        assert "Permission denied" in refused(folder, capsys)
    finally:
        os.seteuid(0)


def test_the_command_line_itself(whole: Path, tmp_path: Path) -> None:
    """As a user has it: a process, bytes for arguments, an exit code and a line."""
    copied(whole, tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    command = [sys.executable, "-m", "fuseline", "generate", "--model", str(tmp_path), *ASKED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"fuseline: {tmp_path}/config.json is a pipe, not a file.\n"
    prompt = [b"generate", b"--preset", b"llama-tiny", b"--device", b"cpu", b"--prompt", b"caf\xe9"]
    done = subprocess.run(
        [sys.executable, "-m", "fuseline", *prompt], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith("fuseline: --prompt is not UTF-8 text")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"hidden_size": 1.5}, "hidden_size"),
        ({"hidden_size": float("nan")}, "NaN, which is no number"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000"),
        ({"hidden_size": 2**24, "intermediate_size": 2**24}, "GiB of memory are free"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it should be 4096 at most"),
        ({"num_attention_heads": 0}, "transformers cannot read it: ZeroDivisionError"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "transformers cannot read it: KeyError"),
        ({"model_type": ["llama"]}, "transformers cannot read it"),
    ],
)
def test_folders_that_transformers_reads(
    changes: dict[str, Any], message: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs transformers to read the folder")
    folder = copied(whole, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert run(["accelerate", str(folder), "--device", "cpu", "--seqlen", "8"]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("fuseline: "))
    assert message in line
    assert len(line) < 600


@pytest.mark.parametrize("verb", [["accelerate"], ["ladder", "--model"]])
def test_a_config_that_is_no_file_or_too_deep(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert run([*verb, str(tmp_path), "--device", "cpu"]) == 2
    assert "is a pipe, not a file" in capsys.readouterr().err
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert run([*verb, str(tmp_path), "--device", "cpu"]) == 2
    assert "nested more than 64 levels deep" in capsys.readouterr().err


def test_more_rows_than_memory_has_room_for_are_refused_before_any_is_made(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "--model", str(whole), *ASKED, "--batch-size", str(10**12)]) == 2
    assert "GiB on cpu" in capsys.readouterr().err


def test_names_in_a_file_write_no_control_characters_to_the_terminal(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(whole, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["evil\n\x1b[31m"] = weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors")
    assert r"unknown evil\n\x1b[31m." in refused(folder, capsys)
