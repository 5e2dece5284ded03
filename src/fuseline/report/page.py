"""From records to a page and its picture files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from fuseline.errors import InputError
from fuseline.files.reading import reason
from fuseline.files.writing import partial_folder
from fuseline.records import Record
from fuseline.report import palette, png, provenance, svg, traces
from fuseline.report.blocks import Drawing, Section
from fuseline.report.charts import Figure
from fuseline.report.layout import compose, framed
from fuseline.report.policy import content_policy
from fuseline.report.sections import (
    attention,
    attention_small,
    compile_suite,
    decode,
    formats,
    generic,
    hardware,
    ladder,
    linear,
    op_suite,
    quality,
    training_state,
    translation,
)
from fuseline.report.selection import Shelf
from fuseline.version import __version__

WIDE, NARROW = 1008.0, 344.0  # pixels: the page's column, and a phone's
FILE = 900.0
THEMES = ("light", "dark")


def build(
    records: Sequence[Record], out: Path, *, title: str | None = None, trace_folders: Sequence[Path] = ()
) -> Path:
    """Write `out/index.html`, which needs nothing else, and a PNG file for each of its figures.

    `trace_folders` hold per-iteration times (`<model>-<backend>.json`); `out/traces` is looked into as well.
    Returns the page's path. Raises `InputError` if there is nothing to show or `out` cannot be written.
    """
    shelf = _shelf(records)
    made = _sections(shelf, [*trace_folders, out / "traces"])
    page = render(shelf, made, title)

    def write(folder: Path) -> None:
        (folder / "index.html").write_text(page, encoding="utf-8")
        for figure in _figures(made):
            png.write(framed(figure, FILE), folder / f"{figure.name}.png")

    write_whole(out, write)
    return out / "index.html"


def figures(records: Sequence[Record], out: Path, *, trace_folders: Sequence[Path] = ()) -> list[Path]:
    """Write each figure by itself, for documents: `<name>-light` and `<name>-dark`, as `.svg` and `.png`."""
    made = _figures(_sections(_shelf(records), trace_folders))
    names: list[str] = []

    def write(folder: Path) -> None:
        for figure in made:
            scene, chart = framed(figure, FILE), figure.chart
            for theme, theme_name in enumerate(THEMES):
                stem = f"{figure.name}-{theme_name}"
                drawn = svg.standalone(scene, title=chart.title, words=chart.words(), theme=theme)
                (folder / f"{stem}.svg").write_text(drawn, encoding="utf-8")
                png.write(scene, folder / f"{stem}.png", theme)
                names.extend((f"{stem}.svg", f"{stem}.png"))

    write_whole(out, write)
    return [out / name for name in names]


def _shelf(records: Sequence[Record]) -> Shelf:
    if not records:
        raise InputError(
            "There are no records to report on. Run `fuseline ladder` first, or name another file."
        )
    return Shelf(records)


def _sections(shelf: Shelf, trace_folders: Sequence[Path]) -> list[Section]:
    return [
        *ladder.sections(shelf),
        *quality.sections(shelf),
        *compile_suite.sections(shelf, traces.load(trace_folders)),
        *op_suite.sections(shelf),
        *linear.sections(shelf),
        *decode.sections(shelf),
        *formats.sections(shelf),
        *hardware.sections(shelf),
        *translation.sections(shelf),
        *attention.sections(shelf),
        *attention_small.sections(shelf),
        *training_state.sections(shelf),
        *generic.sections(shelf),
    ]


def _figures(sections: Sequence[Section]) -> list[Figure]:
    return [block.figure for s in sections for block in s.blocks if isinstance(block, Drawing)]


def render(shelf: Shelf, sections: Sequence[Section], title: str | None = None, *, beside: str = "") -> str:
    """The page as HTML. `beside` names what it is drawn from beside the records."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fuseline.report", "."),
        autoescape=lambda name: name != "style.jinja",  # nothing in it comes from records
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["draw"] = _draw
    alone = len(sections) == 1 and title is None
    devices = ", ".join(dict.fromkeys(r.device for r in shelf.records))
    place = sections[0].subtitle if alone else devices
    style = environment.get_template("style.jinja").render(
        light=palette.css_variables(0),
        dark=palette.css_variables(1),
        classes=palette.css_classes(),
        roles=tuple(palette.COLOURS),
        font=svg.FONT,
    )
    return environment.get_template("page.jinja").render(
        title=title or (sections[0].title if alone else "What makes a transformer fast"),
        alone=alone,
        lead=f"Measured on {place}. Every figure names its versions, samples and interval.",
        sections=sections,
        notes=provenance.notes(shelf.records, shelf.superseded),
        environments=provenance.environments(shelf.records),
        version=__version__,
        drawn_from=" and ".join(filter(None, (f"{len(shelf.records)} records", beside))),
        style=Markup(style),
        policy=content_policy([style]),
    )


def _draw(figure: Figure) -> Markup:
    """The chart twice, for a wide page and for a phone: the style sheet shows one of them."""
    chart = figure.chart
    drawn = (
        svg.inline(compose(chart, width), name=figure.name, title=chart.title, words=chart.words(), kind=kind)
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )
    return Markup("".join(drawn))


def write_page(out: Path, html: str, records: Sequence[Record] = (), name: str = "") -> Path:
    """Write `out/index.html`, and beside it the `records` into a new file of that name. Returns the page's
    path."""

    def write(folder: Path) -> None:
        (folder / "index.html").write_text(html, encoding="utf-8")
        if name:
            lines = "".join(record.to_json() + "\n" for record in records)
            (folder / name).write_text(lines, encoding="utf-8")

    write_whole(out, write)
    return out / "index.html"


def write_whole(out: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside `out`'s files, and move them in only when all are there."""
    try:
        with partial_folder(out) as folder:
            write(folder)
    except OSError as error:
        raise InputError(
            f"Cannot write the report into {out}: {reason(error)}. Name another folder with --out."
        ) from error
