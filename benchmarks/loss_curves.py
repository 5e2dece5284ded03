"""Runs of `fuseline train gpt` in several precisions and from several seeds: a table of their last validation
losses, and the figure of their curves for docs/figures.

    python benchmarks/loss_curves.py bf16-0 bf16-1 fp8-0 fp8-1

Each argument is a run's folder, or a file of records. `python benchmarks/documents.py` draws the same table
from the committed records.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tables import curves

from fuseline import report
from fuseline.records import read
from fuseline.report.sections.precision_curves import found
from fuseline.training.run_records import RECORDS

FIGURES = Path(__file__).parent.parent / "docs" / "figures"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or files of records")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder for the figures (%(default)s)")
    options = parser.parse_args()
    records = read(*(run / RECORDS if run.is_dir() else run for run in options.runs))
    if not found(records):
        print(
            "There are no two precisions of one training here, each from the same two seeds and to one step."
        )
        return 1
    print("\n".join(curves.precisions(records)))
    with tempfile.TemporaryDirectory() as folder:
        for path in report.figures(records, Path(folder) / "figures"):
            if path.name.startswith("precision-curves-") and path.suffix == ".svg":
                options.figures.mkdir(parents=True, exist_ok=True)
                print(shutil.copy(path, options.figures / path.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
