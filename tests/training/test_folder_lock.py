"""One run a folder, and an answer to the first Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuseline.errors import InputError
from fuseline.training.folder_lock import LOCK, held

TINY = [
    *(
        "--tokenizer",
        "char",
        "--num-layers",
        "1",
        "--num-heads",
        "2",
        "--embed-dim",
        "16",
        "--seqlen",
        "16",
    ),
    *("--batch-size", "2", "--eval-batches", "1", "--sample-interval", "0", "--checkpoint-interval", "50"),
    *(
        "--steps",
        "1000000",
        "--device",
        "cpu",
        "--execution",
        "eager",
        "--precision",
        "fp32",
        "--log-interval",
        "1",
    ),
]


def test_the_second_is_refused_by_the_number_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with held(folder):
        with pytest.raises(InputError, match=rf"Process {os.getpid()} is training into .*run"), held(folder):
            pass
        (folder / "kept").touch()
    assert [path.name for path in folder.iterdir()] == ["kept"]
    with held(folder):
        pass


def test_a_folder_for_nothing_is_removed(tmp_path: Path) -> None:
    with held(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []


def test_two_trainings_and_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fuseline", "train", "gpt", "--data", str(tmp_path / "text.txt")]
    command += ["--out", str(out), *TINY]
    log = tmp_path / "log"
    with log.open("wb") as errors:
        first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            deadline = time.monotonic() + 200
            while not (out / "metrics.jsonl").exists():
                assert first.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            second = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=200)
            assert second.returncode == 2
            assert f"Process {first.pid} is training into {out}" in second.stderr
            first.send_signal(signal.SIGINT)
            assert first.wait(100) == 130
        finally:
            first.kill()
            first.wait()
    assert "fuseline: finishing this step; again to stop now" in log.read_text()
    assert (out / "latest.pt").exists()
    assert not (out / LOCK).exists()
