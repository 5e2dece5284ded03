"""The documents' commands exist: verbs and options as the command line has them, targets, scripts, files."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro

from fuseline.cli.help import described
from fuseline.cli.main import VERBS, run

from .documents import DOCUMENTS, ROOT, commands, inline_code, name

PLACEHOLDERS = re.compile(r"\b[A-Z]{2,}\b|\.\.\.")
"""VERB, DIR, SMALLER: what a reader puts something in the place of."""

FILES = ("DIR", "--checkpoint", "train.de", "path/to", "--model my_", "--resume")
ABSENT = (*FILES, "--execution graph", "--write-table", "--help")
"""Parts of commands that want files of the reader's or a GPU, or print their help."""

QUICK = (
    "ladder",
    "train gpt",
    "train translate",
    "generate",
    "bench ops",
    "bench linear",
    "tune --",
    "build",
)
"""Verbs whose `--dry-run` answers within seconds."""


def fuseline_commands() -> list[tuple[Path, str]]:
    """Command lines that begin with `fuseline`, from blocks; from running text those that are complete."""
    found: dict[str, Path] = {}
    for document in DOCUMENTS:
        for line in commands(document):
            if re.match(r"(\.venv/bin/)?fuseline ", line):
                found.setdefault(line.removeprefix(".venv/bin/"), document)
        if document.name != "CHANGELOG.md":
            for code in inline_code(document):
                if code.startswith("fuseline ") and not PLACEHOLDERS.search(code):
                    found.setdefault(code, document)
    return [(document, line) for line, document in found.items()]


COMMANDS = fuseline_commands()


def parsed(line: str) -> tuple[str, Any]:
    """The verb and its options as the command line reads them."""
    words = shlex.split(line)[1:]
    verb = next((v for n in (2, 1) if (v := " ".join(words[:n])) in VERBS), None)
    assert verb is not None, f"there is no verb in {line!r}"
    module = importlib.import_module(VERBS[verb][0])
    rest = words[len(verb.split()) :]
    return verb, tyro.cli(described(module.Options), prog=f"fuseline {verb}", args=rest)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 40


@pytest.mark.parametrize(("document", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_the_command_line_knows_it(document: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    if line.endswith("--help"):
        with pytest.raises(SystemExit) as stop:
            parsed(line)
        assert stop.value.code == 0
        return
    try:
        parsed(line)
    except SystemExit:
        pytest.fail(f"{name(document)}: {line}\n{capsys.readouterr().err}")


DRY = [
    line
    for _, line in COMMANDS
    if any(line.startswith(f"fuseline {verb}") for verb in QUICK) and not any(part in line for part in ABSENT)
]


@pytest.mark.parametrize("line", DRY)
def test_it_would_run_here(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, options = parsed(line)
    fields = {field.name for field in dataclasses.fields(options)}
    assert "dry_run" in fields
    words = [*shlex.split(line)[1:], *(["--device", "cpu"] if "device" in fields else []), "--dry-run"]
    assert run(words) == 0, capsys.readouterr().err


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_other_commands_name_what_is_there(document: Path) -> None:
    for line in commands(document):
        words = shlex.split(line)
        if words[0] == "make":
            assert words[1] in make_targets(), f"{name(document)}: {line}"
        elif re.match(r"(\.venv/bin/)?python$", words[0]):
            for word in words[1:]:
                if "/" in word:
                    assert (ROOT / word).exists(), f"{name(document)}: {line}"
