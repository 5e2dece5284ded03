"""`fuseline inspect`: lists, one kernel in full, its code, and what is said of what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fuseline import inspection
from fuseline.cli.main import run
from fuseline.errors import InputError
from fuseline.inspection import Cuobjdump


@pytest.fixture
def inspect(
    tool: Cuobjdump, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Run the verb over the recorded library, and return what it printed."""
    monkeypatch.setattr(inspection, "find_cuobjdump", lambda: tool)

    def inspected(*words: str, code: int = 0) -> str:
        assert run(["inspect", "--library", str(library), *words]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return inspected


def _cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(name))
    return re.split(r" {2,}", line.strip())


def test_all_kernels_a_line_a_template_with_a_total(inspect) -> None:
    text = inspect("--gpu", "h100")
    assert _cells(text, "scale_rows") == [
        "scale_rows",
        "1",
        "256",
        "14",
        "256",
        "0",
        "548",
        "8",
        "100%",
        "threads",
    ]
    spilled = ["spilled", "1", "1,024", "26", "0", "400", "540", "2", "100%", "registers, threads"]
    assert _cells(text, "spilled") == spilled
    assert _cells(text, "plain")[2] == "?"
    assert "Total: 3 kernels of 3 templates; 1 with local memory; at most 26 registers." in text
    assert "Limits of sm_90 (H100, H200, GH200)" in text
    assert "--shared BYTES" in text


def test_sorted_by_what_is_asked_for(inspect) -> None:
    names = ("plain", "scale_rows", "spilled")

    def order(sort: str) -> list[str]:
        lines = inspect("--gpu", "h100", "--sort", sort).splitlines()
        return [line.split()[0] for line in lines if line.startswith(names)]

    assert order("name") == ["plain", "scale_rows", "spilled"]
    assert order("registers") == ["spilled", "scale_rows", "plain"]
    assert order("shared") == ["scale_rows", "plain", "spilled"]


def test_one_kernel_in_full(inspect) -> None:
    text = inspect("scale", "--gpu", "h100", "--shared", "100000")
    assert "14 a thread" in text
    assert "256 bytes a block, static" in text
    assert "256 at most (launch bounds)" in text
    assert re.search(r"shared memory +2  <- the limit", text)
    assert "2 at once: 16 of 64 warps, an occupancy of 25%." in text


def test_one_kernel_that_registers_limit_says_how_many_fewer(inspect) -> None:
    text = inspect("plain", "--gpu", "sm_80", "--threads", "32")
    assert "32 at once: 32 of 64 warps" in text
    assert re.search(r"blocks +32  <- the limit", text)


def test_numbers_as_json(inspect) -> None:
    told = json.loads(inspect("scale", "--gpu", "h100", "--json"))
    (kernel,) = told["kernels"]
    assert (kernel["registers"], kernel["shared"], kernel["threads"], kernel["blocks"]) == (14, 256, 256, 8)
    assert kernel["limited_by"] == ["threads"]
    assert kernel["limits"]["registers"] == 16


def test_machine_code_and_ptx_of_one_kernel(inspect) -> None:
    text = inspect("plain", "--sass", "--gpu", "h100")
    assert text.startswith("plain, sm_90: 16 instructions; ")
    assert "\n00e0  EXIT" in text
    assert ".visible .entry _ZN8fuseline5plainEPf(" in inspect("plain", "--ptx", "--gpu", "h100")


@pytest.mark.parametrize(
    "words, said",
    [
        (("l", "--sass"), "3 have that in their name"),
        (("spilled", "--ptx"), "has no PTX of spilled"),
        (("--sass",), "name it"),
        (("plain", "--sass", "--ptx"), "give one of them"),
        (("--threads", "2048"), "1 to 1,024"),
        (("--shared", "-1"), "0 bytes or more"),
        (("--sort", "size"), "no order named 'size'"),
        (("--gpu", "V100"), "no GPU named 'V100'"),
        (("blain",), "no kernel named 'blain'. Did you mean 'plain'"),
    ],
)
def test_says_what_is_wrong_and_what_to_type(inspect, words: tuple[str, ...], said: str) -> None:
    assert said in inspect("--gpu", "h100", *words, code=2)


def test_says_that_there_is_no_toolkit(inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Cuobjdump:
        raise InputError("There is no cuobjdump here.")

    monkeypatch.setattr(inspection, "find_cuobjdump", missing)
    assert inspect(code=2) == "fuseline: There is no cuobjdump here.\n"
