"""The page: whole, self-contained, readable by machines that read aloud, and nothing lost."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fuseline import report
from fuseline.errors import InputError
from fuseline.report import page as page_module

VOID = {"meta", "br", "img", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks nesting while reading; keeps ids, visible text, tables and headings."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.headings: list[int] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.attributes.append((tag, values))
        if "id" in values:
            self.ids.append(values["id"])
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"[ \n]+", " ", " ".join(self.text))


@pytest.fixture(scope="module")
def built(tmp_path_factory, all_records):
    out = tmp_path_factory.mktemp("report")
    assert report.build(all_records, out) == out / "index.html"
    return out


@pytest.fixture(scope="module")
def html(built):
    return (built / "index.html").read_text()


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_it_needs_nothing_else(html, page):
    for tag, values in page.attributes:
        assert tag not in ("script", "link", "img", "iframe"), tag
        assert all(not (values.get(key) or "").startswith(("http", "//")) for key in ("src", "href", "data"))
    assert "url(" not in html
    assert "@import" not in html


def test_both_themes_and_narrow_screens_have_their_rules(html):
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    assert html.count('class="chart wide"') == html.count('class="chart narrow"') > 5


def test_ids_are_unique_and_every_reference_finds_one(page):
    assert len(set(page.ids)) == len(page.ids)
    for _, values in page.attributes:
        for key in ("aria-labelledby", "href"):
            for name in (values.get(key) or "").split():
                assert name.removeprefix("#") in page.ids


def test_headings_descend_one_level_at_a_time(page):
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    # A section may begin with a figure's own heading, one level under those of its parts.
    assert all(after <= before + 2 for before, after in zip(page.headings, page.headings[1:], strict=False))


def test_tables_have_headings_captions_and_row_names(html):
    tables = re.findall(r"<table>.*?</table>", html, re.S)
    assert len(tables) > 8
    for found in tables:
        columns = found.count('scope="col"')
        rows = re.findall(r"<tr.*?</tr>", found.split("<tbody>")[1], re.S)
        assert "<caption>" in found
        assert all(row.count('scope="row"') == 1 for row in rows)
        assert all(len(re.findall(r"<t[hd][ >]", row)) == columns for row in rows)


def test_every_figure_names_gpu_versions_samples_and_interval(html):
    captions = re.findall(r"<figcaption.*?>(.*?)</figcaption>", html, re.S)
    assert len(captions) > 8
    for caption in captions:
        assert "H100" in caption
        assert "torch 2.11.0+cu130" in caption
        assert "CUDA 13.0" in caption
        assert re.search(r"n( \(\w+\))? = \d", caption)


def test_the_headline_carries_its_interval(page):
    assert "11.81x" in page.words
    assert "fused AdamW, fuseline kernels, inductor-graph" in page.words
    assert "vocabulary 50\u202f304" in page.words
    assert "[11.77, 11.88] faster than plain PyTorch, 34.9 ms an iteration" in page.words


def test_rungs_stand_in_climb_order_with_what_became_of_them(html):
    table = html[html.index("What each rung gained") :]
    names = [n.strip() for n in re.findall(r'scope="row".*?</span>([\w -]+)', table)]
    assert names[:5] == ["plain PyTorch", "tf32", "bf16", "fp16", "fused-softmax"]
    words = Page(table[: table.index("</table>")].partition("<table>")[2]).words
    assert "nothing to change" not in words
    assert re.search(
        r"<p>Not run here: [^<]*fp32[^<]*\(nothing to change: plain PyTorch has it already\)", html
    )
    assert "dropped against bf16" in words
    assert "0.991x" in words  # a loss, shown


def test_anchors_are_judged(html):
    table = html[html.index("nanoGPT&#39;s own model under each rung, gpt2") :]
    row = {
        name: Page(re.search(rf'scope="row"[^>]*>{name}</th>(.*?)</tr>', table, re.S)[1]).words
        for name in (
            "eager math 50257",
            "inductor naive 50257",
            "inductor default 50304",
            "inductor cudnn 50304",
        )
    }
    assert "matched" in row["eager math 50257"]
    assert "behind" in row["inductor naive 50257"]
    assert "beaten" in row["inductor default 50304"]
    assert not re.search("matched|behind|beaten", row["inductor cudnn 50304"])  # not run


def test_the_seeds_figures_stand_beside_ours(page):
    for figure in ("143", "134", "119", "113", "87.0", "3107", "3098", "2640", "16.0", "16.8", "12.2"):
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", page.words), figure


def test_text_from_records_cannot_become_markup(html):
    assert "<b>first</b>" not in html
    assert "&lt;b&gt;first&lt;/b&gt;" in html


def test_unknown_suites_and_metrics_are_shown(page):
    assert "smoothness of ride, bumps" in page.words
    assert "0.125" in page.words
    assert "Tomorrow" in page.words
    assert "1204" in page.words


def test_no_metric_of_any_suite_is_lost(page, all_records):
    from fuseline.report.metrics import presentation

    drawn_or_beside = {"skipped", "kernels", "loss", "mfu_sigma", "iteration_sigma_ms"}
    for metric in {r.metric for r in all_records} - drawn_or_beside:
        assert presentation(metric).label in page.words, metric
    assert "The loss as it fell" in page.words
    assert "± 0.90%" in page.words
    reasons = {str(r.case["reason"]) for r in all_records if r.metric == "skipped"}
    assert all(reason in page.words for reason in reasons)
    assert "flash_bwd_kernel<64, 128>" in page.words


def test_every_figure_is_a_png_file_too(built, page):
    figures = {values["id"] for tag, values in page.attributes if tag == "figure"}
    assert {f.stem for f in built.glob("*.png")} == figures
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in built.glob("*.png"))


def test_nothing_but_the_page_and_the_pictures_is_left(built):
    assert {f.suffix for f in built.iterdir()} == {".html", ".png"}


def test_how_it_was_measured_names_machine_commit_and_clocks(html):
    words = Page(html[html.index("<footer") : html.index("</footer>") + 9]).words
    for said in ("0123456789ab", "1755/2619 MHz", "612", "2026-11-20 10:02", "A B B A", "6N + 6LCT"):
        assert said in words


def test_a_processor_without_mfu_memory_and_batches(tmp_path, make_ladder, cpu):
    words = Page(report.build(make_ladder(cpu, "tiny", gpu=False), tmp_path).read_text()).words
    assert "needs a CUDA device" in words
    assert "11.20x" in words
    assert "peak memory" not in words
    assert "MFU" not in words
    assert "nan" not in words.lower().split()


def test_one_measured_rung_makes_a_page_without_headline(tmp_path, ladder_records):
    only = [r for r in ladder_records if r.case["rung"] == "plain PyTorch"]
    words = Page(report.build(only, tmp_path).read_text()).words
    assert "plain PyTorch" in words
    assert "faster than" not in words


def test_only_skipped_rungs_make_a_page(tmp_path, ladder_records):
    only = [r for r in ladder_records if r.metric == "skipped"]
    assert "nothing to change" in Page(report.build(only, tmp_path).read_text()).words


def test_two_machines_have_their_own_sections_and_file_names(tmp_path, make_ladder, cpu):
    records = [*make_ladder(), *make_ladder(cpu, gpu=False)]
    html = report.build(records, tmp_path).read_text()
    page = Page(html)
    assert {"ladder-1", "ladder-2"} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    named = re.findall(r'<span class="name">([^<]*)<', html)
    assert len(set(named)) == len(named) == 2


@pytest.mark.parametrize("missing", ["lever", "slot", "order", "kept", "mode", "baseline", "preset", "batch"])
def test_records_that_say_less_are_still_drawn(tmp_path, ladder_records, missing):
    bare = [
        replace(r, case={k: v for k, v in r.case.items() if k != missing})
        for r in ladder_records
        if r.case["mode"] == "cumulative"
    ]
    assert "34.9" in Page(report.build(bare, tmp_path).read_text()).words


@pytest.mark.parametrize(
    "value", [*(pytest.param(v, marks=pytest.mark.full) for v in (0.0, -1.0, 1e-300)), None, 1e300]
)
def test_odd_values_do_not_break_it(tmp_path, all_records, value):
    few = [r for r in all_records if r.suite != "ops" or r.case.get("dtype") in (None, "bf16")]
    odd = [replace(r, value=value, low=None, high=None) for r in few]
    assert "Ladder" in Page(report.build(odd, tmp_path).read_text()).words


def test_older_records_of_the_same_figure_are_counted(tmp_path, ladder_records):
    old = [replace(r, time="2026-11-19T00:00:00+00:00", value=1.0) for r in ladder_records if r.value]
    words = Page(report.build([*old, *ladder_records], tmp_path).read_text()).words
    assert f"{len(old)} older records" in words


def test_a_dirty_tree_is_told(tmp_path, ladder_records):
    dirty = [replace(r, commit=f"{r.commit}-dirty") for r in ladder_records]
    assert "not committed" in Page(report.build(dirty, tmp_path).read_text()).words


def test_no_records_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no records"):
        report.build([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failing_disk_leaves_the_old_page_whole(tmp_path, ladder_records, monkeypatch):
    report.build(ladder_records, tmp_path, title="The old page")
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_module.png, "write", full)
    with pytest.raises(InputError, match="No space left"):
        report.build(ladder_records, tmp_path, title="The new page")
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_a_folder_that_is_a_file_is_an_error(tmp_path, ladder_records):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out"):
        report.build(ladder_records, tmp_path / "file")


def test_figures_by_themselves_come_light_and_dark(tmp_path, ladder_records):
    paths = report.figures(ladder_records, tmp_path)
    assert all(path.exists() for path in paths)
    names = {path.name for path in paths}
    for ending in ("light.svg", "dark.svg", "light.png", "dark.png"):
        assert f"ladder-gpt2-cumulative-{ending}" in names
    light = (tmp_path / "ladder-gpt2-cumulative-light.svg").read_text()
    assert "H100" in light
    assert "n (runs) = 5" in light
