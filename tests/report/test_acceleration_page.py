"""The page of an accelerated model: its chart, its table, its records, and names of bad will."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

from fuseline.acceleration import Acceleration
from fuseline.acceleration.pay import Verdict
from fuseline.acceleration.site import KEPT, NOT_FASTER, REFUSED, SLOWER, Site
from fuseline.records import read
from fuseline.report import build
from fuseline.report.acceleration import RECORDS, save
from fuseline.timing import Ratio

from .test_bad_will import EVIL, Elements

SITES = (
    Site("layers.0.norm", "layer_norm", KEPT, "", "norm", 5e-8, 6e-8, 10.0, 12.5),
    Site("layers.1.norm", "layer_norm", KEPT, "", "norm", 5e-8, 6e-8, 10.0, 12.5),
    Site("embedding", "embedding", NOT_FASTER, SLOWER, "embedding", 0.0, 0.0, 2000.0, 1000.0),
    Site(EVIL, "mlp", REFUSED, f"{EVIL} has hooks"),
)


def made(tmp_path: Path, sites: tuple[Site, ...], whole: Verdict | None = None, name: str = "Net") -> str:
    page = save(Acceleration(nn.Linear(2, 2), sites, whole, ("a note",)), name, tmp_path / "out")
    assert page == tmp_path / "out" / "index.html"
    return page.read_text().replace("\u200b", "")


def test_it_shows_every_site_and_what_it_gains(tmp_path: Path) -> None:
    html = made(tmp_path, SITES, Verdict(2000.0, 1600.0, Ratio(1.25, 1.2, 1.3, 12)))
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", html, re.S)
    norms, embedding, refused = (
        next(row for row in rows if f">{path}" in row) for path in ("layers.{0..1}.norm (2)", "emb", "&#34;")
    )
    errors = "5.0\u202f×\u202f10⁻⁸", "6.0\u202f×\u202f10⁻⁸"
    for said in ("layer_norm", *errors, "10.0 us", "12.5 us", "1.25x", "kept"):
        assert f">{said}" in norms
    for said in ("2.00 ms", "1.00 ms", "0.50x", "not faster", SLOWER):
        assert f">{said}" in embedding
    assert "has hooks" in refused
    wide = html[html.index('class="chart wide"') : html.index('class="chart narrow"')]
    (long, first), (short, second) = re.findall(r'width="([\d.]+)"[^>]*><title>([^<]*)</title>', wide)
    assert (first, second) == ("layers.{0..1}.norm (2), layer_norm: 1.25x", "embedding, embedding: 0.50x")
    assert float(long) / float(short) == pytest.approx(1.25 / 0.5, rel=0.01)
    assert "n (pairs) = 12" in html
    for said in ("2.00 ms", "1.60 ms", "of 4 run", "12 pairs, 1.20x to 1.30x", "a note"):
        assert said in html


def test_names_of_the_model_stay_text(tmp_path: Path) -> None:
    named = Site(EVIL, EVIL, KEPT, EVIL, EVIL, 1e-7, 1e-7, 1.0, 2.0)
    html = made(tmp_path, (*SITES, named), name=EVIL)
    elements = Elements(html).found
    assert not [tag for tag, _ in elements if tag in ("img", "script", "iframe", "link", "object")]
    assert not [name for _, given in elements for name in given if name.startswith("on") or name == "style"]
    policy = next(given["content"] or "" for _, given in elements if "http-equiv" in given)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_its_records_are_read_and_drawn(tmp_path: Path) -> None:
    made(tmp_path, SITES, Verdict(2000.0, 1600.0, Ratio(1.25, 1.2, 1.3, 12)))
    made(tmp_path, SITES, Verdict(2000.0, 1600.0, Ratio(1.25, 1.2, 1.3, 12)))  # takes the place of the first
    records = read(tmp_path / "out" / RECORDS)
    times = {(r.case.get("site"), r.peer): r.value for r in records if r.metric == "time_us"}
    assert times["embedding", "fuseline"] == 2000.0
    assert times["embedding", "eager"] == 1000.0
    assert times[None, "fuseline"] == 1600.0
    assert [r.case["reason"] for r in records if r.metric == "skipped"] == [f"{EVIL} has hooks"]
    assert len(records) == 3 * 4 + 1 + 3
    assert "embedding" in build(records, tmp_path / "again").read_text()


@pytest.mark.parametrize("sites", [(), (SITES[3],)])
def test_where_nothing_was_timed_there_is_no_chart(sites: tuple[Site, ...], tmp_path: Path) -> None:
    html = made(tmp_path, sites)
    assert f"0 of {len(sites)}" in html
    assert "<svg" not in html
