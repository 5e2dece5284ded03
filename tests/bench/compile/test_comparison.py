"""A comparison whole: together, alone where memory does not suffice, and skipped with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuseline.bench.compile import comparison, contest
from fuseline.bench.compile.backends import BACKENDS, Backend, find_backends
from fuseline.bench.compile.comparison import compare
from fuseline.bench.compile.contender import Contender
from fuseline.bench.compile.contest import Contest
from fuseline.bench.compile.outcome import Settings
from fuseline.bench.compile.workloads import PRESETS

SETTINGS = Settings(torch.device("cpu"), "fp32", iterations=6, seed=0)
VIT = PRESETS["small"]["vit"]


def test_a_processor_runs_eager_and_says_why_not_the_rest() -> None:
    seen = []
    outcomes = compare(
        VIT,
        find_backends(("eager", "cudagraphs", "reduce-overhead")),
        None,
        SETTINGS,
        observe=lambda *event: seen.append(event),
    )
    eager, cudagraphs, reduce_overhead = [*outcomes]
    assert eager.measured is not None
    assert len(eager.measured.times_ms) == 6
    assert all(
        0 <= wait < ms for wait, ms in zip(eager.measured.waits_ms, eager.measured.times_ms, strict=True)
    )
    assert cudagraphs.skipped == "needs a CUDA device: it replays CUDA graphs"
    assert reduce_overhead.skipped == "needs a CUDA device: without CUDA graphs it is inductor"
    assert seen == [("vit", "eager", "prepare", 0, 6), ("vit", "eager", "run", 6, 6)]


def test_what_does_not_fit_together_runs_alone_and_unpaired(
    monkeypatch: pytest.MonkeyPatch, scripted: Callable[..., Contender]
) -> None:
    tenants: list[Contender] = []

    class Tenant(scripted):  # type: ignore[misc, valid-type]
        def close(self) -> None:
            tenants.remove(self)

    def prepare(_workload: object, backend: Backend, *_: object) -> Contender:
        """Room for one at a time, and none for cudagraphs."""
        if tenants or backend.name == "cudagraphs":
            raise torch.OutOfMemoryError("full")
        tenants.append(Tenant(backend, log=[], ms=1.0))
        return tenants[0]

    monkeypatch.setattr(contest, "prepare", prepare)
    monkeypatch.setattr(comparison, "why_not", lambda backend, device: None)
    found = find_backends(tuple(BACKENDS))
    outcomes = [*compare(VIT, found, None, SETTINGS, beside=found[0], observe=lambda *_: None)]
    cudagraphs = next(outcome for outcome in outcomes if outcome.backend.name == "cudagraphs")
    assert cudagraphs.skipped == "does not fit in this device's memory, even alone"
    others = [outcome for outcome in outcomes if outcome is not cudagraphs]
    assert len(others) == len(BACKENDS) - 1
    for outcome in others:
        assert outcome.measured is not None
        assert outcome.measured.paired is None
        assert len(outcome.measured.times_ms) == 6


def test_convolutions_are_autotuned_during_the_comparison_only(monkeypatch: pytest.MonkeyPatch) -> None:
    during = []
    monkeypatch.setattr(Contest, "take_turns", lambda *_: during.append(torch.backends.cudnn.benchmark))
    before = torch.backends.cudnn.benchmark
    list(compare(VIT, find_backends(("eager",)), None, SETTINGS, observe=lambda *_: None))
    assert during == [True]
    assert torch.backends.cudnn.benchmark is before
