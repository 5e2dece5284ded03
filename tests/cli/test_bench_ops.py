"""`fuseline bench ops`: its plan, its output, its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuseline import native
from fuseline.bench.ops import suite
from fuseline.bench.ops.measure import directions
from fuseline.cli.main import run
from fuseline.ops import registered

TINY = ["--device", "cpu", "--quick", "--elements", "2048", "--lengths", "64", "--precision", "fp32"]


@pytest.fixture
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No build of the native library, no copy of a large buffer."""
    monkeypatch.setattr(native, "ready", lambda device_type: False)
    monkeypatch.setattr(suite, "copy_bandwidth_gbs", lambda device: 10.0)


def test_a_dry_run_lists_cases_and_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "bench",
        "ops",
        "--dry-run",
        "--device",
        "cpu",
        "--lengths",
        "256",
        "1024",
        "--out",
        str(tmp_path),
    ]
    assert run([*arguments, "--ops", "softmax", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["cases"] == [
        {"op": "softmax", "dtype": dtype, "rows": 2**20 // n, "n": n}
        for dtype in ("bfloat16", "float32")
        for n in (256, 1024)
    ]
    assert plan["peers"]["eager"] is None
    assert plan["peers"]["liger"]
    assert run(arguments) == 0
    assert f"{4 * len(registered())} cases on cpu, forward and backward" in capsys.readouterr().out
    assert run(["bench", "ops", "--dry-run", "--device", "cpu", "--quick"]) == 0
    assert f"{len(registered())} cases on cpu" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick_machine")
def test_a_run_ends_with_table_absent_peers_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "ops", *TINY, "--peers", "fuseline,eager,quack", "--out", str(tmp_path)]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    kinds = [[op.name, "float32", way] for op in registered() for way in directions(op)]
    # The worst of each first, then every case.
    assert [line.split()[:3] for line in printed.splitlines() if "float32" in line] == 2 * kinds
    assert "quack skipped, all: not installed" in printed
    assert (tmp_path / "index.html").exists()


@pytest.mark.usefixtures("quick_machine")
def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "bench",
        "ops",
        *TINY,
        "--peers",
        "eager",
        "--ops",
        "softmax",
        "--json",
        "--out",
        str(tmp_path),
    ]
    assert run(arguments) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert {(r["peer"], r["case"]["op"]) for r in records} == {("copy", "copy"), ("eager", "softmax")}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--ops", "softmacs"], "There is no op named 'softmacs'. Did you mean 'softmax'?"),
        (["--precision", "fp16,float"], "There is no precision named 'float'."),
        (["--peers", "inducter"], "There is no peer named 'inducter'. Did you mean 'inductor'?"),
        (["--lengths", "-3"], "A row of length -3 has nothing in it"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["bench", "ops", "--device", "cpu", "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
