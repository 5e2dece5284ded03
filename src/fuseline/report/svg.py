"""A scene as SVG: inside the page, its colours from the page's variables; or as a file of its own."""

from __future__ import annotations

import html
import re

from fuseline.report.anchors import anchor
from fuseline.report.palette import css_classes, css_variables
from fuseline.report.scene import Circle, Mark, Path, Rect, Scene

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def escape(text: str) -> str:
    """Text for an element or an attribute; characters that XML has no way to write become a mark."""
    return html.escape(_NOT_XML.sub("\ufffd", text))


def inline(scene: Scene, *, name: str, title: str, words: str, kind: str) -> str:
    """An `<svg>` for the page. `kind` is a class to show it by width; `title` and `words` are its text."""
    label, description = (escape(f"{anchor(name)}-{kind}-{part}") for part in "td")
    return (
        f'<svg class="chart {kind}" viewBox="0 0 {_n(scene.width)} {_n(scene.height)}" role="img" '
        f'aria-labelledby="{label} {description}" xmlns="http://www.w3.org/2000/svg">'
        f'<title id="{label}">{escape(title)}</title><desc id="{description}">{escape(words)}</desc>'
        f"{_body(scene)}</svg>"
    )


def standalone(scene: Scene, *, title: str, words: str, theme: int) -> str:
    """A whole SVG file in theme 0 (light) or 1 (dark)."""
    style = f"svg {{ {css_variables(theme)} font-family: {FONT}; }} {css_classes()}"
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(scene.width)}" height="{_n(scene.height)}" '
        f'viewBox="0 0 {_n(scene.width)} {_n(scene.height)}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(words)}</desc>"
        f"<style>{style}</style>{_body(scene)}</svg>\n"
    )


def _body(scene: Scene) -> str:
    return "".join(_mark(mark) for mark in scene.marks)


def _mark(mark: Mark) -> str:
    if isinstance(mark, Rect):
        radius = f' rx="{_n(mark.radius)}"' if mark.radius else ""
        return _closed(
            f'<rect class="f-{mark.fill}" x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" '
            f'height="{_n(mark.height)}"{radius}{_opacity(mark.opacity)}',
            mark.tip,
            "rect",
        )
    if isinstance(mark, Circle):
        return _closed(
            f'<circle class="f-{mark.fill} s-{mark.stroke}" cx="{_n(mark.x)}" cy="{_n(mark.y)}" '
            f'r="{_n(mark.radius)}"{_opacity(mark.opacity)}',
            mark.tip,
            "circle",
        )
    if isinstance(mark, Path):
        return _path(mark)
    anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
    weight = ' font-weight="600"' if mark.bold else ""
    return (
        f'<text class="f-{mark.fill}" x="{_n(mark.x)}" y="{_n(mark.y)}" font-size="{_n(mark.size)}"'
        f"{anchor}{weight}>{escape(mark.text)}</text>"
    )


def _path(path: Path) -> str:
    classes = " ".join(
        [f"f-{path.fill}" if path.fill else "empty", *([f"s-{path.stroke}"] if path.stroke else [])]
    )
    points = " ".join(f"{_n(x)},{_n(y)}" for x, y in path.points)
    dash = f' stroke-dasharray="{" ".join(map(_n, path.dash))}"' if path.dash else ""
    stroke = f' stroke-width="{_n(path.width)}"' if path.stroke else ""
    fill = "" if path.fill else ' fill="none"'
    return _closed(
        f'<polyline class="{classes}" points="{points}"{stroke}{dash}{fill}{_opacity(path.opacity)}',
        path.tip,
        "polyline",
    )


def _closed(start: str, tip: str, tag: str) -> str:
    return f"{start}><title>{escape(tip)}</title></{tag}>" if tip else f"{start}/>"


def _opacity(value: float) -> str:
    return "" if value == 1 else f' opacity="{_n(value)}"'


def _n(value: float) -> str:
    """A coordinate to a tenth of a pixel (opacity and such to a hundredth)."""
    return f"{value:.{1 if abs(value) >= 2 else 2}f}".rstrip("0").rstrip(".")
