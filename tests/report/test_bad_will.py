"""A page drawn from records of bad will: nothing of theirs becomes markup, a script or a file's path."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fuseline.errors import InputError
from fuseline.records import Record, read
from fuseline.report import build, figures
from fuseline.report.anchors import anchor

from .conftest import CPU

EVIL = '"><img src=x onerror=alert(1)><script>alert(2)</script> ../../evil'


class Elements(html.parser.HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def evil_records() -> list[Record]:
    ops = {"op": EVIL, "rows": 8, "dtype": EVIL, "direction": "fw"}
    ladder = {
        "model": EVIL,
        "preset": EVIL,
        "mode": "combination",
        "combination": EVIL,
        "rung": EVIL,
        "kept": True,
    }
    made = [
        Record.of("ops", {**ops, "n": n}, "bandwidth_gbs", 5.0 + n, CPU, peer=EVIL, peer_version=EVIL)
        for n in (64, 128, 256)
    ]
    made += [
        Record.of("ladder", {**ladder, "rung": f"{EVIL} {i}", "order": i}, "iteration_ms", 3.0 + i, CPU)
        for i in range(3)
    ]
    return [replace(record, device=EVIL, commit=EVIL, clocks=EVIL) for record in made]


def test_text_stays_text(tmp_path: Path) -> None:
    page = build(evil_records(), tmp_path / "out", title=EVIL).read_text()
    elements = Elements(page).found
    assert not [tag for tag, _ in elements if tag in ("img", "script", "iframe", "link", "object")]
    assert not [name for _, given in elements for name in given if name.startswith("on") or name == "style"]
    ids = [given["id"] for _, given in elements if given.get("id")]
    assert all(re.fullmatch(r"[A-Za-z][\w.-]*", one or "") for one in ids)
    assert len(ids) == len(set(ids))
    for tag, given in elements:
        for one in (given.get("aria-labelledby") or "").split():
            assert one in ids, (tag, one)
        if tag == "a":
            assert (given["href"] or "")[1:] in ids
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_pictures_by_themselves_stay_within_their_folder(tmp_path: Path) -> None:
    written = figures(evil_records(), tmp_path / "out")
    assert written
    assert {path.parent for path in written} == {tmp_path / "out"}
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert not [path for path in written if path.suffix == ".svg" and "<img" in path.read_text()]


def test_the_policy_lets_nothing_run_and_only_the_pages_own_style_apply(tmp_path: Path) -> None:
    page = build(evil_records(), tmp_path).read_text()
    policy = next(
        given["content"] or ""
        for tag, given in Elements(page).found
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy"
    )
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"style-src 'sha256-{digest}'" in policy
    assert "script-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.index("Content-Security-Policy") < page.index("<style>")


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"device": None}, "device is None"),
        ({"value": "3"}, "value is '3'"),
        ({"value": True}, "value is True"),
        ({"value": -1.0}, "time_us is always above 0"),
        ({"low": 5.0, "high": 1.0}, "low is 5.0, which is above high, 1.0"),
        ({"n": 2.5}, "n is 2.5"),
        ({"n": -1}, "n is -1"),
        ({"time": "yesterday"}, "time is 'yesterday'"),
        ({"torch": "2\n3"}, "torch is"),
        ({"case": None}, "case is None"),
        ({"case": {"op": "x", "n": "64"}}, "case: n is '64'"),
        ({"case": {"op": "x", "rows": [1]}}, "is not flat"),
        ({"case": {"op": "x", "direction": "sideways"}}, "direction is 'sideways'"),
        ({"case": {"section": "seed"}}, "its case lacks"),
        ({"case": {str(i): i for i in range(200)}}, "at most 100"),
    ],
)
def test_odd_records_are_refused_by_line(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    record = Record.of("ops", {"op": "softmax", "n": 64}, "time_us", 2.0, CPU)
    good = record.to_json()
    path = tmp_path / "ops.jsonl"
    path.write_text(f"{good}\n{json.dumps({**json.loads(good), **changes})}\n{good}\n")
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"a": NaN}', '{"suite": ' * 50_000, '"x"', '{"suite": "\\ud800"}', "\x00"]
)
def test_odd_lines_are_refused_by_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "ops.jsonl"
    path.write_text(f"{line}\n{line}\n")
    with pytest.raises(InputError, match=r"ops\.jsonl:1: "):
        read(path)


def test_a_separator_within_a_text_ends_no_line(tmp_path: Path) -> None:
    record = Record.of("ops", {"op": "softmax", "note": "one\u2028two\u0085three"}, "time_us", 2.0, CPU)
    path = tmp_path / "ops.jsonl"
    path.write_text(record.to_json() + "\n")
    assert read(path) == [record]


def test_names_are_fit_and_stay_apart() -> None:
    assert anchor("ladder-llama3.2-1b") == "ladder-llama3.2-1b"
    odd = [anchor(name) for name in (EVIL, EVIL + "x", "../x", "", "1", "a b", "a/b", "é", "x" * 500)]
    assert len(set(odd)) == len(odd)
    assert all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,99}", name) for name in odd)
