from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import pytest

from fuseline.errors import InputError
from fuseline.files.json_lines import append_lines, split_lines
from fuseline.files.reading import read_bytes
from fuseline.files.schema import checked, parse_json, shown


@dataclass(frozen=True)
class Inner:
    kind: str = "a"


@dataclass(frozen=True)
class Shape:
    layers: int
    dropout: float = 0.0
    window: Optional[int] = None
    inner: Inner = Inner()

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise InputError(f"layers is {self.layers}; it must be 1 or more.")


def test_plain_values_make_a_dataclass() -> None:
    assert checked(Shape, {"layers": 3, "inner": {"kind": "b"}}, "x") == Shape(3, inner=Inner("b"))


@pytest.mark.parametrize(
    "values,message",
    [
        ({}, "x: it lacks layers."),
        ({"layers": 3.0}, r"x: layers is 3.0. It should be a valid integer."),
        ({"layers": True}, "layers is True"),
        ({"layers": "3"}, "layers is '3'"),
        ({"layers": 0}, "x: layers is 0; it must be 1 or more."),
        ({"layers": 3, "heads": 2}, "heads is not known"),
        ({"layers": 3, "dropout": float("nan")}, "no plain value"),
        ({"layers": object()}, "no plain value"),
        ({"layers": 3, "inner": {"kind": 1}}, "inner.kind is 1"),
        ({"layers": "y" * 10**6}, r"layers is 'yyyy"),
    ],
)
def test_each_complaint_is_one_short_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        checked(Shape, values, "x", extra="forbid")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_lists_that_name_themselves_many_times_end() -> None:
    value: list[object] = []
    for _ in range(60):
        value = [value, value]
    with pytest.raises(InputError, match="more than 10,000 values"):
        checked(Shape, {"layers": value}, "x")
    assert len(shown(value)) < 200


@pytest.mark.parametrize("text", ["NaN", "[1, Infinity]", "1e999", "-1e999"])
def test_what_is_no_number_is_no_json(text: str) -> None:
    with pytest.raises(InputError, match="no number"):
        parse_json(text, "x")


@pytest.mark.parametrize("depth", [65, 900, 100_000])
def test_json_is_shallow(depth: int) -> None:
    with pytest.raises(InputError, match="nested more than 64 levels deep"):
        parse_json("[" * depth + "]" * depth, "x")
    assert parse_json("[" * 60 + "]" * 60, "x")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match="1,099,511,627,776 bytes"):
        read_bytes(tmp_path / "sparse")


def test_a_line_cut_off_is_removed_before_more_are_added(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "\xe2\x80\xa8 is no end"}\n{"a": ')
    lines, torn = split_lines(path.read_bytes())
    assert (len(lines), torn) == (2, True)
    append_lines(path, '{"a": 3}\n')
    assert [json.loads(line)["a"] for line in split_lines(path.read_bytes())[0]] == [1, "\u2028 is no end", 3]
    path.write_bytes(b'{"a": 1}')  # whole, but for its newline
    append_lines(path, '{"a": 2}\n')
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'
