"""Draw records as one self-contained HTML page and PNG files, or as single figures for documents."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fuseline.errors import InputError

DEFAULT_OUT = Path("fuseline-report")
RUN_METRICS, RUN_RECORDS = "metrics.jsonl", "records"  # of a run of `fuseline train`, in its folder
SET_ASIDE = "-previous.jsonl"  # what a ladder that starts anew renames the file before it to


@dataclass(frozen=True)
class Options:
    records: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RECORDS")] = ()
    """Files of records (JSON lines), or folders of them."""
    out: Path = DEFAULT_OUT
    """Folder for the page and the PNG files."""
    figures: Path | None = None
    """Write no page, but each figure by itself into this folder: light and dark, SVG and PNG."""
    title: str | None = None
    """The page's title."""
    json: bool = False
    """Print one JSON object with the paths of what was written."""
    dry_run: bool = False
    """Say what would be read and written, and do nothing."""


def run(options: Options) -> int:
    files = _files(options.records)
    target = options.figures or options.out / "index.html"
    if options.dry_run:
        _print(options, [target], f"Would draw {', '.join(map(str, files))} as {target}.")
        return 0
    from fuseline import report
    from fuseline.records import read

    records = read(*files)
    traces = [file.parent / "traces" for file in files]
    if options.figures:
        written = report.figures(records, options.figures, trace_folders=traces)
    else:
        written = [report.build(records, options.out, title=options.title, trace_folders=traces)]
    _print(options, written, "\n".join(map(str, written)))
    return 0


def _files(given: tuple[Path, ...]) -> list[Path]:
    """The files named, and those in the folders named; of a training run's folder its records."""
    if not given:
        raise InputError("Name files of records, or folders of them: `fuseline report fuseline-ladder`.")
    from fuseline.records.store import PATTERN

    files: list[Path] = []
    for path in given:
        if path.is_dir():
            folder = path / RUN_RECORDS if (path / RUN_METRICS).exists() else path
            found = sorted(f for f in folder.glob(PATTERN) if not f.name.endswith(SET_ASIDE))
            if not found:
                raise InputError(
                    f"There is no file of records (*.jsonl) in {path}. Name another folder, or a file."
                )
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise InputError(
                f"There is no file {path}. Name a file of records, as `fuseline ladder` writes them."
            )
    return list(dict.fromkeys(files))


def _print(options: Options, paths: list[Path], words: str) -> None:
    if options.json:
        key = "figures" if options.figures else "page"
        print(json.dumps({key: [str(path) for path in paths] if options.figures else str(paths[0])}))
    else:
        print(words)
