"""Contenders that keep to a script, so that rules can be tested without a model or a clock."""

from __future__ import annotations

import pytest

from fuseline.bench.compile.backends import Backend
from fuseline.bench.compile.contender import Contender


class Scripted(Contender):
    """A contender whose every iteration takes `ms`, by its own word; `log` is told of runs and the end."""

    def __init__(self, backend: Backend, log: list[str], ms: float, loss: float = 2.0) -> None:
        super().__init__(backend, None, None, loss, 1.5, ms, None)  # type: ignore[arg-type]
        self.log, self.ms, self.last_loss = log, ms, loss

    def run(self, iterations: int) -> list[float]:
        self.log.append(f"{self.backend.name} {iterations}")
        self.times_ms += [self.ms] * iterations
        self.waits_ms += [0.0] * iterations
        return self.times_ms[-iterations:]

    def close(self) -> None:
        self.log.append(f"{self.backend.name} closed")


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted
