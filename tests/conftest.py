"""Rules for all tests: GPU tests skip with the reason, workers share the cores, native code is built once,
and what a test draws does not depend on those before it."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

from fuseline import native


def pytest_configure(config: pytest.Config) -> None:
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
