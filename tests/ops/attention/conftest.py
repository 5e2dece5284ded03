from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuseline.ops.attention import choice


@pytest.fixture
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    choice.forget()
    yield
    choice.forget()
