"""The command line's manners: help, versions, suggestions, exit codes."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from fuseline.cli.help import described, flowing
from fuseline.cli.main import VERBS, run
from fuseline.cli.options import check_folder, resolve_device
from fuseline.errors import InputError, unknown_name
from fuseline.version import __version__


def test_the_overview_names_every_verb(capsys):
    assert run([]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in VERBS)


def test_version(capsys):
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["doktor"], "Did you mean 'doctor'"),
        (["bench", "complie"], "Did you mean 'compile'"),
        (["bench"], "needs a second word: acceleration, step, ops"),
        (["train", "--help"], "gpt"),
        (["quux"], "Known: accelerate"),
    ],
)
def test_a_wrong_verb_gets_one_line_and_exit_code_2(capsys, arguments, said):
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(capsys, verb):
    with pytest.raises(SystemExit) as stop:
        run([*verb.split(), "--help"])
    assert stop.value.code == 0
    assert f"fuseline {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["ladder", "train gpt", *(v for v in VERBS if v.startswith("bench "))])
def test_what_cannot_be_written_is_refused_before_anything_is_measured(capsys, tmp_path, verb):
    taken = tmp_path / "taken"
    taken.write_text("of another kind")
    assert run([*verb.split(), "--device", "cpu", "--out", str(taken / "new")]) == 2
    assert f"{taken} is a file; --out names a folder." in capsys.readouterr().err


def test_a_folder_that_may_be_made_is_not_made_by_looking(tmp_path, monkeypatch):
    check_folder(tmp_path / "a" / "b", "--out")
    assert list(tmp_path.iterdir()) == []

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(InputError, match=r"/a: No space left on device\. Give another --save"):
        check_folder(tmp_path / "a", "--save")


@dataclass(frozen=True)
class Shared:
    seed: int = 0
    """Of weights, batches
    and samples."""
    out: str = "here"
    """Where to."""


@dataclass(frozen=True)
class Options(Shared):
    batch: int = 1
    """Sequences a step,
    (of any length)
    --steps of them."""
    out: str = "there"
    """Where
    this one writes to."""
    bare: int = 2


def test_the_terminal_alone_breaks_the_lines_of_help():
    said = {field.name: field.metadata.get("help") for field in fields(described(Options))}
    assert said == {
        "seed": "Of weights, batches and samples.",
        "out": "Where this one writes to.",
        "batch": "Sequences a step, (of any length) --steps of them.",
        "bare": None,
    }
    assert flowing("One\n(two)\n\nthree\n--four\n") == "One (two)\n\nthree --four"


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "mps"])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(InputError, match=name):
        resolve_device(name)


def test_unknown_names_list_the_known_when_nothing_is_near():
    assert "Known: alpha, beta" in str(unknown_name("thing", "zzz", ["alpha", "beta"]))


@pytest.mark.parametrize("verb", ["ladder", "generate", "bench ops"])
def test_help_shows_no_default_where_there_is_none(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        run([*verb.split(), "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "(default: auto)" in out
    assert not any(odd in out for odd in ("None", "(default: )", "False)"))
