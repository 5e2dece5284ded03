"""The page of a profiled step, and the folder that holds it."""

from __future__ import annotations

from pathlib import Path

from fuseline.profiling import Profile, saved
from fuseline.profiling.records import records_of
from fuseline.report import page
from fuseline.report.profile.section import section
from fuseline.report.selection import Shelf

__all__ = ["save"]


def save(profile: Profile, folder: Path | str) -> Path:
    """Write the profile's page, `index.html`, with its data, its records and its traces into `folder`,
    which is made. Returns the path of the page. Raises `InputError` if it cannot be written."""
    folder = Path(folder)
    shelf = Shelf(records_of(profile))
    html = page.render(shelf, [section(profile)], beside="profile.json")
    saved.write(profile, folder)
    return page.write_page(folder, html)
