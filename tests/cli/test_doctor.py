"""`fuseline doctor`: what it prints, and its exit code."""

from __future__ import annotations

import json

import pytest

from fuseline import doctor
from fuseline.cli.main import run
from fuseline.doctor import Check

WELL = Check("Software", "python", "ok", "3.11 in [somewhere]")
ABSENT = Check("Optional packages", "wandb", "absent", "not installed", "pip install wandb")
WARNED = Check("Native core", "nvcc", "warn", "no nvcc was found", "pip install 'fuseline[nvcc]'")
BROKEN = Check("Correctness", "softmax on cpu", "bad", "wrong in float32", "FUSELINE_NATIVE=0")


@pytest.mark.parametrize(
    "checks, code, verdict",
    [
        ([WELL, ABSENT], 0, "All is well."),
        ([WELL, WARNED], 0, "Usable, with 1 warning."),
        ([WELL, WARNED, BROKEN], 1, "Broken: 1. Warnings: 1."),
    ],
)
def test_the_exit_code_says_whether_it_is_usable(monkeypatch, capsys, checks, code, verdict):
    monkeypatch.setattr(doctor, "examine", lambda build: checks)
    assert run(["doctor"]) == code
    out = capsys.readouterr().out
    assert verdict in out
    for check in checks:
        assert check.found in out
        assert check.mend in out


def test_marks_are_words_not_colours_alone(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda build: [WELL, ABSENT, WARNED, BROKEN])
    run(["doctor"])
    out = capsys.readouterr().out
    assert all(mark in out for mark in ("ok", "absent", "warning", "broken"))


def test_json_holds_every_check(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda build: [WELL, BROKEN])
    assert run(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["usable"] is False
    assert told["checks"][1] == {
        "group": "Correctness",
        "name": "softmax on cpu",
        "state": "bad",
        "found": "wrong in float32",
        "mend": "FUSELINE_NATIVE=0",
    }
