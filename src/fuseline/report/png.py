"""A scene as a PNG file, painted by matplotlib without a display and without its global state.

Marks are added as artists: `plot` and `add_patch` would also have the axes fit their limits to each.
"""

from __future__ import annotations

from pathlib import Path as FilePath

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle as CirclePatch
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

from fuseline.report.palette import COLOURS
from fuseline.report.scene import Circle, Mark, Path, Rect, Scene

DPI = 200.0  # a scene's pixel is 1/96 inch, as in CSS, so this is a little more than twice its size
POINTS = 72.0 / 96.0


def write(scene: Scene, path: FilePath, theme: int = 0) -> None:
    """Write `scene` to `path` in theme 0 (light) or 1 (dark)."""
    figure = Figure(figsize=(scene.width / 96, scene.height / 96), dpi=DPI)
    FigureCanvasAgg(figure)
    figure.patch.set_facecolor(COLOURS["surface"][theme])
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)  # the scene's origin is at the top
    for order, mark in enumerate(scene.marks):
        _paint(axes, mark, theme, order)
    figure.savefig(path, format="png", metadata={"Software": "fuseline"})


def _paint(axes, mark: Mark, theme: int, order: int) -> None:  # type: ignore[no-untyped-def]
    if isinstance(mark, Rect):
        axes.add_artist(_rectangle(mark, theme, order))
    elif isinstance(mark, Circle):
        axes.add_artist(
            CirclePatch(
                (mark.x, mark.y),
                mark.radius,
                facecolor=COLOURS[mark.fill][theme],
                edgecolor=COLOURS[mark.stroke][theme],
                linewidth=POINTS,
                alpha=mark.opacity,
                zorder=order,
            )
        )
    elif isinstance(mark, Path):
        _paint_path(axes, mark, theme, order)
    else:
        axes.text(
            mark.x,
            mark.y,
            mark.text,
            fontsize=mark.size * POINTS,
            color=COLOURS[mark.fill][theme],
            ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor],
            va="baseline",
            fontweight="bold" if mark.bold else "normal",
            family="DejaVu Sans",
            parse_math=False,
            zorder=order,
        )


def _rectangle(mark: Rect, theme: int, order: int) -> Rectangle | FancyBboxPatch:
    if mark.radius:
        rounding = min(mark.radius, mark.width / 2, mark.height / 2)
        shape: Rectangle | FancyBboxPatch = FancyBboxPatch(
            (mark.x, mark.y), mark.width, mark.height, boxstyle=f"round,pad=0,rounding_size={rounding}"
        )
    else:
        shape = Rectangle((mark.x, mark.y), mark.width, mark.height)
    shape.set(facecolor=COLOURS[mark.fill][theme], edgecolor="none", alpha=mark.opacity, zorder=order)
    return shape


def _paint_path(axes, mark: Path, theme: int, order: int) -> None:  # type: ignore[no-untyped-def]
    if mark.fill:
        axes.add_artist(
            Polygon(
                mark.points,
                closed=True,
                facecolor=COLOURS[mark.fill][theme],
                edgecolor=COLOURS[mark.stroke][theme] if mark.stroke else "none",
                linewidth=mark.width * POINTS,
                alpha=mark.opacity,
                zorder=order,
            )
        )
        return
    xs, ys = zip(*mark.points, strict=True)
    width = mark.width * POINTS
    dash = (0.0, tuple(length / mark.width for length in mark.dash)) if mark.dash else None
    axes.add_artist(
        Line2D(
            xs,
            ys,
            color=COLOURS[mark.stroke][theme],
            linewidth=width,
            linestyle=dash or "solid",
            alpha=mark.opacity,
            zorder=order,
            solid_joinstyle="round",
        )
    )
