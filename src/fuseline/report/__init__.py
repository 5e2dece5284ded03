"""Records in, one HTML page and picture files out."""

from fuseline.report.page import build, figures

__all__ = ["build", "figures"]
