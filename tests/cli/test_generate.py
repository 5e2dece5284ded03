"""`fuseline generate`: text and figures, and one clear message for each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.cli.main import run
from fuseline.data.tokenizers import ByteBPETokenizer
from fuseline.generation.generate import generate
from fuseline.models.gpt import GPT
from fuseline.models.gpt_checkpoints import save_nanogpt
from fuseline.models.gpt_config import GPTConfig
from fuseline.models.gpt_hugging_face import save_hugging_face
from fuseline.models.llama import Llama, preset
from fuseline.models.llama_hugging_face import save_llama
from fuseline.models.pretrained import load_model
from fuseline.training.checkpoint import save_weights
from fuseline.training.text_generator import Wanted, load, memory

CPU = ["--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = Llama(preset("llama-tiny"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    save_llama(model, folder)
    ByteBPETokenizer.train(["a b c hello world " * 20], 300).save(folder / "tokenizer.json")
    return folder


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(["generate", *CPU, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_text_goes_in_and_comes_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answered(capsys, "--model", str(folder), "--prompt", "hello", "world a", "--max-new-tokens", "9")
    assert told["tokens"] == generate(load_model(folder), told["prompts"], 9)
    assert told["new_tokens"] == 18
    assert told["steps"] == 9
    assert told["tokens_per_s"] > 0
    assert told["share_of_copy"] > 0
    assert run(["generate", *CPU, "--model", str(folder), "--prompt", "hello", "--max-new-tokens", "9"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"hello{told['texts'][0]}\n"
    assert "9 tokens in 9 steps: first after" in printed.err


def test_numbers_stand_apart_from_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--preset", "llama-tiny", "--prompt", "hello", "--max-new-tokens", "3"]
    (numbers,) = answered(capsys, *shape)["texts"]
    assert run(["generate", *CPU, *shape]) == 0
    assert capsys.readouterr().out == f"hello {numbers}\n"


def test_batches_drafts_caches_and_formats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = answered(capsys, "--model", str(folder), "--prompt-ids", "1,2,3", "--max-new-tokens", "12")
    drafted = answered(
        capsys,
        "--model",
        str(folder),
        "--prompt-ids",
        "1,2,3",
        "--max-new-tokens",
        "12",
        "--draft",
        str(folder),
    )
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["steps"] < plain["steps"]
    for options in (["--quant", "int8"], ["--quant", "int4", "--group-size", "32"], ["--cache", "int8"]):
        told = answered(
            capsys,
            "--model",
            str(folder),
            "--prompt-ids",
            "1,2",
            "--batch-size",
            "2",
            "--max-new-tokens",
            "3",
            *options,
        )
        assert [len(row) for row in told["tokens"]] == [3, 3]
    smaller = answered(
        capsys, "--preset", "llama-tiny", "--quant", "int8", "--prompt", "ab", "--max-new-tokens", "2"
    )
    assert smaller["weight_gib"] < plain["weight_gib"]


def test_a_saved_quantized_model_is_read_as_it_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ["--prompt", "hello", "--max-new-tokens", "9"]
    kept = ["--quant", "int4", "--group-size", "32", "--save", str(tmp_path / "small")]
    told = answered(capsys, "--model", str(folder), *prompt, *kept)
    monkeypatch.setattr("fuseline.training.text_generator.load_model", None)  # the whole one is not read
    again = answered(capsys, "--model", str(tmp_path / "small"), *prompt)
    assert again["texts"] == told["texts"]
    assert again["weight_gib"] == told["weight_gib"]
    assert run(["generate", *CPU, "--model", str(tmp_path / "small"), *prompt, "--quant", "int8"]) == 2
    assert "is quantized already, to int4: leave --quant out" in capsys.readouterr().err
    monkeypatch.setattr("fuseline.generation.footprint.available", lambda device: 2**10)
    assert run(["generate", *CPU, "--model", str(tmp_path / "small"), *prompt]) == 2
    assert "GiB on cpu (weights 0.0" in capsys.readouterr().err


def test_stops_and_seeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = answered(capsys, "--model", str(folder), "--prompt", "hello", "--max-new-tokens", "20")["texts"][
        0
    ]
    stop = whole[3:5]
    assert answered(
        capsys, "--model", str(folder), "--prompt", "hello", "--max-new-tokens", "20", "--stop", stop
    )["texts"] == [whole[: whole.index(stop)]]
    drawn = [
        "--model",
        str(folder),
        "--prompt",
        "a",
        "--temperature",
        "1",
        "--top-p",
        "0.9",
        "--max-new-tokens",
        "9",
    ]
    first, again, other = (answered(capsys, *drawn, "--seed", seed)["tokens"] for seed in ("1", "1", "2"))
    assert first == again != other


LLAMA = ["--preset", "llama-tiny", "--prompt", "a"]
DRAFTED = [*LLAMA, "--draft", "llama3-8b"]


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([], "Name one model"),
        (["--preset", "llama-tiny", "--model", "x"], "model, preset given"),
        (["--preset", "llama-tiny"], "There is no prompt"),
        (["--preset", "llama-tiny", "--prompt", ""], "Prompt 1 is empty"),
        (["--preset", "llama-tiny", "--prompt-ids", "512"], "ids from 512 to 512"),
        (["--preset", "llama-tiny", "--prompt-ids", "a"], "numbers separated by commas"),
        (["--preset", "llama-tiny", "--prompt", "a" * 300], "context is 256"),
        (["--preset", "llama-tiny", "--prompt", "a" * 256], "no room for new ones"),
        ([*LLAMA, "--temperature", "0", "--top-k", "5"], "takes the likeliest token: --top-k would"),
        ([*LLAMA, "--seed", str(2**63)], "seed is 9223372036854775808"),
        ([*LLAMA, "--seed", "-1"], "seed is -1"),
        (["--preset", "llama-tiny", "--prompt", "caf\udce9"], "--prompt is not UTF-8 text"),
        ([*LLAMA, "--stop", "\udcff"], "--stop is not UTF-8 text"),
        (["--preset", "llama-tinny", "--prompt", "a"], "Did you mean 'llama-tiny'"),
        ([*LLAMA, "--quant", "int2"], "Did you mean"),
        ([*LLAMA, "--precision", "bf17"], "Did you mean 'bf16'"),
        ([*LLAMA, "--top-k", "0"], "--top-k is 0"),
        ([*LLAMA, "--temperature", "-1"], "--temperature is -1"),
        ([*LLAMA, "--top-p", "2"], "--top-p is 2"),
        ([*LLAMA, "--min-p", "2"], "--min-p is 2"),
        ([*LLAMA, "--repetition-penalty", "0"], "--repetition-penalty is 0"),
        ([*LLAMA, "--batch-size", "0"], "each is 1 or more"),
        (["--preset", "llama2-7b", "--batch-size", "4000000", "--prompt", "a"], "GiB on cpu"),
        (["--model", "/nowhere", "--prompt", "a"], "/nowhere"),
        ([*LLAMA, "--save", "x"], "--save writes quantized models"),
        ([*LLAMA, "--quant", "int8", "--save", __file__], "a folder"),
        (["--preset", "llama-tiny", "--prompt-ids", ""], "Prompt 1 is empty"),
        ([*LLAMA, "--quant", "int4", "--group-size", "48"], "--group-size is 48"),
        ([*LLAMA, "--quant", "int4", "--method", "hpq"], "mean 'hqq'"),
        ([*LLAMA, "--quant", "int4", "--method", "gptq"], "--method hqq, which"),
        ([*LLAMA, "--quant", "fp8", "--method", "hqq"], "with --quant int8"),
        ([*LLAMA, "--method", "hqq"], "name a format with --quant"),
        ([*LLAMA, "--quant", "nf4", "--method", "hqq"], "int3, int5; nf4 has nearest and fitted"),
        ([*LLAMA, "--cache", "int5"], "int8"),
        (DRAFTED, "knows 128256 tokens and the model 512"),
        ([*DRAFTED[:-1], "llama-tiny", "--repetition-penalty", "1.1"], "do not go together"),
        ([*DRAFTED[:-1], "llama-tiny", "--draft-tokens", "0"], "--draft-tokens is 0"),
        ([*DRAFTED[:3], "a" * 251, "--draft", "llama-tiny"], "leaves no room for new ones"),
        ([*DRAFTED[:-1], "llama-tinny"], "Did you mean 'llama-tiny'"),
    ],
)  # fmt: skip
def test_one_clear_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", *CPU, *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "loading" not in told
    assert not re.search(r"[a-z]_[a-z]|\w=", told.replace(__file__, ""))  # options, not Python
    assert told.strip().count("\n") <= 1


def test_a_config_that_is_not_of_its_weights(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 99}))
    assert run(["generate", *CPU, "--model", str(tmp_path), "--prompt", "a", "--max-new-tokens", "2"]) == 2
    assert "do not belong together" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["hugging face", "best.pt", "latest.pt", "ckpt.pt"])
def test_a_gpt_is_measured_before_it_is_read(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=300, num_layers=1, num_heads=2, embed_dim=32))
    if kind == "hugging face":
        save_hugging_face(model, tmp_path)
    elif kind == "ckpt.pt":
        save_nanogpt(model, tmp_path / kind)
    else:
        save_weights(tmp_path / kind, model, step=1, validation_loss=1.0)
    asked = ["--model", str(tmp_path / kind if kind == "ckpt.pt" else tmp_path), "--prompt-ids", "1,2"]
    whole = answered(capsys, *asked, "--max-new-tokens", "3")["tokens"]
    assert whole == generate(model.eval(), [[1, 2]], 3)
    assert run(["generate", *CPU, *asked, "--max-new-tokens", "15", "--json"]) == 0
    told = capsys.readouterr()
    assert len(json.loads(told.out)["tokens"][0]) == 14
    assert "writing 14 new tokens, not 15: the model's context is 16" in told.err
    monkeypatch.setattr("fuseline.training.text_generator._read", None)
    monkeypatch.setattr("fuseline.generation.footprint.available", lambda device: 2**10)
    assert run(["generate", *CPU, *asked, "--max-new-tokens", "3"]) == 2
    assert "GiB on cpu" in capsys.readouterr().err


def test_a_draft_is_counted_before_anything_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for the model, or for the draft, and not for both."""
    asked = ["--model", str(folder), "--prompt-ids", "1,2", "--max-new-tokens", "3"]
    takes = memory(folder, None, dtype=torch.float32, wanted=Wanted(1, 2, 5))
    assert takes is not None
    monkeypatch.setattr("fuseline.generation.footprint.available", lambda device: int(1.5 * takes.total))
    assert len(answered(capsys, *asked)["tokens"][0]) == 3
    assert run(["generate", *CPU, *asked, "--draft", str(folder)]) == 2
    told = capsys.readouterr().err
    assert "the draft 0.0 GiB" in told
    assert "loading" not in told


def test_weights_are_rounded_as_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", str(folder), "--prompt-ids", "1,2", "--max-new-tokens", "3"]
    for method in ("nearest", "fitted", "hqq"):
        quantized = ["--quant", "int4", "--group-size", "32", "--method", method]
        generator = load(
            folder,
            None,
            device=torch.device("cpu"),
            dtype=torch.float32,
            wanted=Wanted(1, 2, 5),
            quant="int4",
            group_size=32,
            method=method,
        )
        assert answered(capsys, *asked, *quantized)["tokens"] == generate(generator.model, [[1, 2]], 3)


def test_dry_run_loads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", *CPU, "--preset", "llama2-7b", "--prompt", "abc", "--dry-run"]) == 0
    assert "llama2-7b on cpu would write 128 tokens after 1 prompt(s)" in capsys.readouterr().out


def test_filters_raise_the_temperature(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --temperature they draw; greedy tokens are the same whatever the seed."""
    shape = ["--preset", "llama-tiny", "--prompt", "hello", "--max-new-tokens", "8"]
    drawn = [answered(capsys, *shape, "--top-k", "50", "--seed", seed)["tokens"] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_a_text_ends_at_any_of_the_ids_that_the_model_names(
    where: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    asked = ["--model", str(tmp_path), "--prompt", "hello", "--max-new-tokens", "20"]
    (whole,) = answered(capsys, *asked)["tokens"]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 511}))
    said = json.loads((tmp_path / where).read_text()) if (tmp_path / where).exists() else {}
    (tmp_path / where).write_text(json.dumps({**said, "eos_token_id": [510, whole[5]]}))
    (ended,) = answered(capsys, *asked)["tokens"]
    assert ended == whole[: whole.index(whole[5])]
