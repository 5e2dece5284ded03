"""One flag, one name: what sizes and number formats are called in every verb."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from fuseline.cli.main import VERBS, run
from fuseline.cli.renamed import RENAMED


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_has_an_old_name(verb: str) -> None:
    fields = {field.name for field in dataclasses.fields(importlib.import_module(VERBS[verb][0]).Options)}
    old = {flag.removeprefix("--").replace("-", "_") for flag in RENAMED}
    # Of text: how many, not how large. And the dtype of the tensors that an op is given, not a precision.
    others = {"bench quality": {"batches"}, "explain": {"dtype"}}
    assert fields & old == others.get(verb, set())


@pytest.mark.parametrize(
    "line, said",
    [
        (["ladder", "--batch", "4"], "`fuseline ladder` calls --batch --batch-size now."),
        (["generate", "--dtype=bf16"], "`fuseline generate` calls --dtype --precision now."),
        (["train", "gpt", "--block-size", "64"], "`fuseline train gpt` calls --block-size --seqlen now."),
        (["tune", "--dtype", "bfloat16"], "`fuseline tune` calls --dtype --precision now."),
        (["bench", "ops", "--dtypes", "float32"], "`fuseline bench ops` calls --dtypes --precision now."),
        (["bench", "decode", "--batches", "8"], "`fuseline bench decode` calls --batches --batch-size now."),
        (["tune", "--preset", "tiny", "--precision", "bfloat16"], "--precision bfloat16 is written bf16."),
    ],
)
def test_an_old_name_is_answered_with_the_new_one(
    capsys: pytest.CaptureFixture[str], line: list[str], said: str
) -> None:
    assert run(line) == 2
    assert capsys.readouterr().err == f"fuseline: {said}\n"


def test_seqlen_reaches_the_configuration(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    line = ["train", "gpt", "--seqlen", "64", "--out", f"{tmp_path}/run", "--device", "cpu", "--dry-run"]
    assert run([*line, "--json"]) == 0
    assert '"block_size": 64' in capsys.readouterr().out
