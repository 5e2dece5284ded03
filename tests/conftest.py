"""Rules for all tests: GPU tests skip with the reason, workers share the cores, native code is built once,
and what a test draws does not depend on those before it. `--record FILE` keeps what became of each test."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import pytest
import torch
from hypothesis import settings

from fuseline import native
from fuseline.records import describe

ERROR_LENGTH = 4000

LONGEST_FIRST = (
    "tests/bench/decode/test_suite.py",
    "tests/examples/test_custom_op.py",
    "tests/bench/ladder/test_run.py",
    "tests/fuzz/test_files_and_kills.py",
    "tests/fuzz/test_fuzz.py",
    "tests/docs/test_seeds.py",
    "tests/training/test_distributed.py",
    "tests/benchmarks/test_documents.py",
    "tests/ops/test_contract_autograd.py",
    "tests/bench/compile/test_comparison.py",
    "tests/acceleration/test_transformers_models.py",
    "tests/bench/step/test_step_suite.py",
    "tests/report/test_page.py",
    "tests/docs/test_python_blocks.py",
)
"""Files of half a minute and more. A worker runs a whole file, so a long one must not begin last."""


class RunRecord:
    """A line of JSON for the machine, then one for each test as it ends: a run that is cut short has told all
    that it saw."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._write(asdict(describe("cuda" if torch.cuda.is_available() else "cpu")))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            told = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
            if report.failed:
                told["error"] = report.longreprtext[-ERROR_LENGTH:]
            self._write(told)

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write what becomes of each test to this file, as it ends")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path is not None and not hasattr(config, "workerinput"):  # workers report to the process that writes
        config.pluginmanager.register(RunRecord(path))
    if torch.cuda.is_available():
        # A GPU test that ran a reference in the kernels' place would prove nothing.
        os.environ.setdefault("FUSELINE_STRICT", "1")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    # The same examples on every run: a failure is then the change's, not the draw's.
    settings.register_profile("same", derandomize=True)
    settings.load_profile("same")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Build outside of any test: none is timed out by a compiler, none builds in a cache of its own."""
    if not session.config.option.collectonly:
        native.load()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """What is in memory by now stays there: exclude it from the many garbage collections in tests."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_order)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _order(item: pytest.Item) -> int:
    """The place of the item's file in `LONGEST_FIRST`; other files keep their order behind those."""
    file = item.nodeid.split("::")[0]
    return LONGEST_FIRST.index(file) if file in LONGEST_FIRST else len(LONGEST_FIRST)
