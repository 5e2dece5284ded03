"""A library whose kernels were recorded: what cuobjdump printed of one, in place of the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuseline.inspection import Cuobjdump

RECORDED = Path(__file__).parent / "recorded"
ANSWERS = f"""#!/bin/sh
case "$1" in
  -res-usage) cat '{RECORDED}/resources.txt' ;;
  -sass) cat '{RECORDED}/sass.txt' ;;
  -ptx) cat '{RECORDED}/ptx.txt' ;;
  -xelf) cp '{RECORDED}/liba.cubin' liba.5.sm_90.cubin ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def tool(tmp_path: Path) -> Cuobjdump:
    folder = tmp_path / "toolkit"
    folder.mkdir()
    for name in ("cuobjdump", "nvdisasm"):
        (folder / name).write_text(ANSWERS)
        (folder / name).chmod(0o755)
    return Cuobjdump(folder / "cuobjdump")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "liba.so").touch()
    return tmp_path / "liba.so"
