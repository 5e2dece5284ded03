"""From a chart to a scene: where every mark stands, at a given width."""

from fuseline.report.layout.compose import compose, framed

__all__ = ["compose", "framed"]
