"""docs/seeds.md: every command of the page runs, in a small form, or says what machine it wants."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuseline import native
from fuseline.cli.main import run
from fuseline.training import train as training
from fuseline.training.config import preset as train_preset

from .documents import ROOT, commands

PAGE = ROOT / "docs" / "seeds.md"

TRAIN = "train gpt --preset tiny --data TEXT --tokenizer char --steps 2 --eval-batches 1"
COMPILE = "bench compile --backends eager --iterations 6 --data TEXT"
CLOCK = "train gpt --preset gpt2 --data python-packages --tokenizer bpe --vocab-size 50257"
TAIL = (
    "--accumulation 4 --warmup-steps 200 --eval-batches 40 --validation-fraction 0.02 --sample-interval 0 "
    "--minutes 10 --patience 5"
)
SMALL_CLOCK = (
    "train gpt --preset tiny --data TEXT --tokenizer bpe --vocab-size 300 --accumulation 4 --batch-size 2 "
    "--seqlen 32 --eval-batches 1 --validation-fraction 0.2 --minutes 10 --patience 5 --steps 2"
)
SMALL: dict[str, str] = {
    "profile gpt2 --execution eager": "profile tiny --execution eager --steps 1 --batch-size 1",
    "bench attention --suite small --forms shared": (
        "bench attention --suite small --forms shared --only 'S=10 E=64' --no-page"
    ),
    "report results": "report RECORDS",
    "doctor": "doctor --json",
    "bench attention --suite masks": "bench attention --suite masks --every 9 --no-flex --no-page",
    "ladder --mode alone --rungs attention": (
        "ladder --preset tiny --mode alone --rungs math --batch-size 1 --seqlen 16 --steps 1 --runs 2 "
        "--budget 30s --max-batch none"
    ),
    "bench ops --seed-shapes": "bench ops --seed-shapes --quick --peers eager",
    "train translate": "train translate --preset tiny --steps 2 --bleu False",
    "train translate --no-fused": "train translate --preset tiny --no-fused --steps 2 --bleu False",
    "train gpt --arena True": f"{TRAIN} --arena True",
    f"{CLOCK} --attention naive --execution inductor {TAIL} --out naive": (
        f"{SMALL_CLOCK} --attention naive --execution eager"
    ),
    f"{CLOCK} --norm fuseline --loss fuseline-linear --execution graph {TAIL} --out fast": (
        f"{SMALL_CLOCK} --norm fuseline --loss fuseline-linear --execution eager"
    ),
    "train gpt --out naive --resume --minutes 60": "train gpt --out RUN --resume --minutes 60",
    "train gpt --out fast --resume --minutes 60": "train gpt --out RUN --resume --steps 3",
    "report naive fast --out page": "report RUN --out PAGE",
    "bench compile --models gpt2 shakespeare --iterations 1000": f"{COMPILE} --models shakespeare",
    "bench compile --price-per-hour 3": f"{COMPILE} --models lstm --price-per-hour 3",
    "bench hardware --parts latency examples": "bench hardware --parts calls",
    "profile": "profile --steps 1 --batch-size 1",
    "bench linear --parts chart": (
        "bench linear --parts chart --sizes 64 --repeats 1 --peers fuseline eager"
    ),
    "bench decode": (
        "bench decode --preset tiny --formats int8 --peers fuseline --batch-size 1 --runs 2 --steps 1"
    ),
    "bench quality": (
        "bench quality --checkpoint RUN --formats int8 int3 ternary w8a8 nf4 mxfp4 --batches 1"
    ),
    'generate --preset llama2-7b --quant int8 --prompt "Once upon a time"': (
        "generate --preset tiny --quant int8 --prompt-ids 1,2 --max-new-tokens 2"
    ),
}
"""A command of the page after the word fuseline, and how it runs here. TEXT, RUN, RECORDS and PAGE are put
in."""

DRY = (
    "ladder",
    "ladder --preset gpt2 --mode combination --rungs seed-001",
    "ladder --preset gpt2 --max-batch all",
    "ladder --preset shakespeare --mode combination --rungs seed-003 --budget none",
    "ladder --mode alone --rungs precision",
    "ladder --mode alone --rungs execution",
    "tune --preset gpt2",
    "build",
    "build --wheel",
    "bench attention --suite decode long",
)
"""Those that are long even when small: they say what they would do."""

ELSEWHERE: dict[str, str] = {
    "--data openwebtext": "wants a network",
    "--data multi30k": "wants a network",
    "path/to": "wants a file of the reader's",
    "my_model.py": "wants a file of the reader's",
    "fuseline explain compile": "compiles for minutes",
    "fuseline inspect": "wants compiled kernels",
    "examples/without_torch": "wants a GPU",
    "--measure": "wants a GPU",
}
"""What commands have in them that do not run here, and why; tests of their own run these where they can."""

SCRIPTS: dict[str, list[str]] = {
    "python examples/custom_op/lstm_cell.py --out results": ["--calls", "2", "--runs", "2", "--out", "OUT"],
    "python examples/custom_op/relu.py": [],
    "python examples/custom_op/relu_triton.py": [],
    "python examples/custom_op/shared_memory.py": [],
    "python benchmarks/training_arena.py": ["shakespeare"],
}


def test_every_command_of_the_page_is_here() -> None:
    page = {line for line in commands(PAGE) if not any(part in line for part in ELSEWHERE)}
    here = {*(f"fuseline {line}" for line in (*SMALL, *DRY)), *SCRIPTS}
    assert page - here == set(), "commands of the page that no test runs"
    assert here - page == set(), "commands that are not on the page any more"


@pytest.fixture
def places(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """What is put into a command: a text, a run of a tiny GPT, records."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} sheep sleep, {n + 1} sheep leap. " for n in range(400)))
    found = {"TEXT": str(text), "PAGE": str(tmp_path / "page"), "RECORDS": str(tmp_path / "run"), "RUN": ""}
    small = SMALL[request.node.callspec.params["line"]]
    if "RUN" in small or "RECORDS" in small:
        config = train_preset("tiny", data=str(text), tokenizer="char", steps=2, eval_batches=1, batch_size=2)
        training.train(config, folder=tmp_path / "run", device="cpu")
        from fuseline.training.run_records import write_run_records

        write_run_records(tmp_path / "run", torch.device("cpu"))
        found["RUN"] = str(tmp_path / "run")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("line", SMALL)
def test_it_runs_small(
    line: str,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [places.get(word, word) for word in shlex.split(SMALL[line])]
    if words[0] not in ("doctor", "report"):
        words += ["--device", "cpu"]
    code = run(words)
    assert code == 0 or (words[0] == "doctor" and code == 1), capsys.readouterr().err


@pytest.mark.parametrize("line", DRY)
def test_it_says_what_it_would_do(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    device = [] if words[0] == "build" else ["--device", "cpu"]
    assert run([*words, *device, "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(native.compilers()["cxx"].compiler is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("line", SCRIPTS)
def test_a_script_runs(line: str, tmp_path: Path) -> None:
    script = ROOT / line.split()[1]
    more = [str(tmp_path) if word == "OUT" else word for word in SCRIPTS[line]]
    done = subprocess.run(
        [sys.executable, str(script), *more], capture_output=True, text=True, timeout=280, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
