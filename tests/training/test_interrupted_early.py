"""Ctrl-C before the first step ends a run at once: there is nothing to save yet."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuseline.training.interruption import BEFORE_THE_FIRST_STEP, interruptible

CHARACTERS = 12_000_000  # three batches of the tokenizer's: several seconds of native code
PATIENCE = 60.0


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(3)
    line = " ".join(f"{draw.getrandbits(40):x}" for _ in range(CHARACTERS // 11))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(line)
    return path


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("learning merges", signal.SIGINT),
        pytest.param("encoding", signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_while_the_text_is_tokenized(moment: str, number: int, text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fuseline", "train", "gpt", "--data", str(text), "--vocab-size", "2000"]
    cache = tmp_path / "cache"
    child = subprocess.Popen(
        [*command, "--device", "cpu", "--out", str(tmp_path / "run")],
        env={**os.environ, "FUSELINE_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    if moment == "encoding":
        assert child.stdout.readline().startswith("tokenized")
    else:
        deadline = time.monotonic() + PATIENCE
        while not list(cache.glob("tokens/.*.building/*")):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)
    child.send_signal(number)
    began = time.monotonic()
    assert child.wait(PATIENCE) == 130
    assert time.monotonic() - began < 5
    assert child.stderr.read() == f"fuseline: {BEFORE_THE_FIRST_STEP}\n"
    assert not (tmp_path / "run").exists()
    assert not list(cache.glob("tokens/.*.building"))
    child.stdout.close()
    child.stderr.close()


def test_a_signal_is_a_wish_from_the_first_step_on() -> None:
    with interruptible() as interruption:
        with pytest.raises(KeyboardInterrupt, match="before the first step"):
            os.kill(os.getpid(), signal.SIGINT)
        interruption.steps_begin()
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.wanted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
