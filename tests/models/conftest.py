"""What models are compared with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def transformers() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations are not ours to mend
        yield pytest.importorskip("transformers", reason="needs transformers to compare with")
