"""The two painters: well-formed SVG that follows the page's theme, and PNG files with something on them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from fuseline.report import palette, png, svg
from fuseline.report.scene import Circle, Path, Rect, Scene, Text

SCENE = Scene(
    200.0,
    100.0,
    (
        Rect(0, 0, 200, 100, "surface"),
        Rect(10, 10, 50, 20, "fuse", radius=2, tip="a <b> & c"),
        Path(((10, 50), (60, 55), (110, 50)), stroke="kernels", width=2, dash=(4, 2)),
        Path(((10, 60), (60, 65), (60, 90)), fill="tensor", opacity=0.2),
        Circle(150, 50, 8, "overhead"),
        Text(10, 95, "less < more $x^2$", bold=True, anchor="start"),
    ),
)
NAMESPACE = "{http://www.w3.org/2000/svg}"


def test_inline_svg_is_well_formed_named_and_described():
    root = ElementTree.fromstring(svg.inline(SCENE, name="a", title="Time <ms>", words="x & y", kind="wide"))
    assert root.get("role") == "img"
    texts = {child.get("id"): child.text for child in root if child.get("id")}
    assert [texts[name] for name in root.get("aria-labelledby").split()] == ["Time <ms>", "x & y"]
    assert root.find(f"{NAMESPACE}rect[2]/{NAMESPACE}title").text == "a <b> & c"


def test_inline_svg_takes_every_colour_from_the_page():
    drawn = svg.inline(SCENE, name="a", title="t", words="w", kind="wide")
    assert not re.search(r"#[0-9a-f]{3,6}|rgb\(|style=", drawn)
    used = set(re.findall(r"[fs]-([a-z]+)", drawn))
    assert {"fuse", "kernels", "tensor", "overhead", "ink"} <= used <= set(palette.COLOURS)


@pytest.mark.parametrize("theme", [0, 1])
def test_a_file_by_itself_holds_the_colours_of_its_theme(theme):
    drawn = svg.standalone(SCENE, title="t", words="w", theme=theme)
    root = ElementTree.fromstring(drawn.encode())
    assert root.get("width") == "200"
    assert f"--fuse: {palette.COLOURS['fuse'][theme]};" in drawn
    assert palette.COLOURS["fuse"][1 - theme] not in drawn


@pytest.mark.parametrize("theme", [0, 1])
def test_a_png_has_each_mark_in_its_place_and_colour(tmp_path, theme):
    png.write(SCENE, tmp_path / "a.png", theme)
    pixels = (imread(tmp_path / "a.png")[..., :3] * 255).round()
    height, width = pixels.shape[:2]
    assert width / height == pytest.approx(2.0, rel=0.02)

    def at(x, y):
        return pixels[int(y / 100 * height), int(x / 200 * width)]

    def colour(role):
        value = palette.COLOURS[role][theme].removeprefix("#")
        return np.array([int(value[i : i + 2], 16) for i in (0, 2, 4)])

    assert np.abs(at(190, 5) - colour("surface")).max() <= 2
    assert np.abs(at(30, 20) - colour("fuse")).max() <= 2
    assert np.abs(at(150, 50) - colour("overhead")).max() <= 2
    assert np.abs(at(55, 70) - colour("surface")).max() > 5  # the band, faint


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("ground", ["page", "surface"])
def test_text_and_marks_can_be_read_on_their_ground(theme, ground):
    behind = palette.COLOURS[ground][theme]
    for role in ("ink", "muted", "accent", "good", "bad"):
        assert _contrast(palette.COLOURS[role][theme], behind) >= 4.5, role
    for role in ("baseline", "fuse", "tensor", "overhead", "quantize", "kernels", "other"):
        assert _contrast(palette.COLOURS[role][theme], behind) >= 3.0, role


def test_every_lever_and_peer_has_a_colour():
    from fuseline.bench.ladder.rungs import LEVERS, NO_LEVER

    assert all(palette.lever_role(name) != "other" for name in (*LEVERS, NO_LEVER))
    assert {palette.lever_role(n) for n in LEVERS} | {palette.peer_role("unheard of")} <= set(palette.COLOURS)
    assert palette.lever_label("unheard of") == "unheard of"
