"""What is kept by given times, the whole step's veto, proofs of earlier runs, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.acceleration import judge, kept_proofs, pay
from fuseline.acceleration.accelerate import accelerate_by
from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.pay import Clock, Verdict
from fuseline.acceleration.recordable import HeldGraphError
from fuseline.acceleration.table import table

from .conftest import GivenClock

OPTIONS: dict[str, Any] = {
    "train": None,
    "levels": ("exact",),
    "only": (),
    "skip": (),
    "dry_run": False,
    "strict": False,
    "time_sites": True,
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.LayerNorm(16))


def by(clock: Clock, given: nn.Module, batch: torch.Tensor | None = None) -> Acceleration:
    return accelerate_by(clock, given, torch.randn(3, 8) if batch is None else batch, **OPTIONS)


@pytest.mark.parametrize("ratio, status", [(2.0, "kept"), (1.0, "kept"), (0.9, "not faster")])
def test_what_pays_is_kept(ratio: float, status: str) -> None:
    given = model()
    fast = by(GivenClock(ratio), given)
    assert {site.status for site in fast.sites} == {status}
    assert all(site.gain == pytest.approx(ratio) for site in fast.sites)
    assert sum("forward" in vars(m) for m in given.modules()) == (3 if status == "kept" else 0)


def test_equal_sites_are_timed_once() -> None:
    clock = GivenClock(2.0)
    by(clock, model())
    assert clock.asked == 3  # one norm, GELU, the whole step


class Veto(GivenClock):
    """Every site pays, and the whole step is slower until two are left out."""

    def compare(self, original: Any, swapped: Any, device: torch.device) -> Verdict:
        whole = "whole" in getattr(original, "__module__", "")
        self.ratio = 0.5 if whole and self.asked < 3 else 2.0
        return super().compare(original, swapped, device)


class InTurn(GivenClock):
    """Gives one ratio after the other, the last one again and again."""

    def __init__(self, *ratios: float) -> None:
        super().__init__(ratios[0])
        self.ratios = list(ratios)

    def compare(self, original: Any, swapped: Any, device: torch.device) -> Verdict:
        self.ratio = self.ratios.pop(0) if len(self.ratios) > 1 else self.ratios[0]
        return super().compare(original, swapped, device)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.linear(x))


@pytest.mark.parametrize("both, status", [(12.0, "kept"), (9.0, "not faster"), (0.9, "not faster")])
def test_a_norm_with_its_sum_is_faster_than_one_after_the_other(both: float, status: str) -> None:
    fast = by(InTurn(10.0, both, 2.0), Residual())  # the norm alone takes 1 s in the place of 10
    assert {site.kind: site.status for site in fast.sites} == {"layer_norm": "kept", "residual_norm": status}
    changed = {name for name, module in fast.model.named_modules() if "forward" in vars(module)}
    assert changed == ({"norm", "linear"} if status == "kept" else {"norm"})


def test_the_whole_step_takes_sites_out() -> None:
    given = model()
    fast = by(Veto(2.0), given)
    assert {site.status for site in fast.sites} == {"kept", "not faster"}
    assert sum("forward" in vars(m) for m in given.modules()) == len(fast.kept)
    assert fast.whole is not None
    assert fast.whole.ratio.value == 2.0
    assert "whole step was not faster" in str(fast)
    clock = GivenClock(2.0)
    again = by(clock, model())
    assert (again.sites, again.whole, clock.asked) == (fast.sites, fast.whole, 0)
    assert {m for m, module in again.model.named_modules() if "forward" in vars(module)} == {
        m for m, module in given.named_modules() if "forward" in vars(module)
    }


def test_proofs_and_times_are_kept_between_runs(kept_apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by(GivenClock(2.0), model())
    assert list(kept_apart.glob("*.json"))

    def never(*_: object) -> None:
        raise AssertionError("proved again")

    monkeypatch.setattr(judge, "prove", never)
    clock = GivenClock(2.0)
    fast = by(clock, model())
    assert len(fast.kept) == 3
    assert fast.whole is not None
    assert clock.asked == 0
    with monkeypatch.context() as other:
        other.setattr(kept_proofs, "libraries", lambda: ("fuseline_torch-of-other-sources",))
        with pytest.raises(AssertionError, match="proved again"):
            by(GivenClock(2.0), model())
    for file in kept_apart.glob("*.json"):
        file.write_text("{ half a file")
    with pytest.raises(AssertionError, match="proved again"):
        by(GivenClock(2.0), model())


def test_the_table_puts_equal_sites_together() -> None:
    text = str(by(GivenClock(2.0), nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.LayerNorm(16))))
    assert "{1..2} (2)" in text
    assert "2 of 2 sites run Fuseline's ops." in text
    assert "Whole step: 2000.00 ms before, 1000.00 ms now; in pairs 2.00x as fast (2.00 to 2.00)." in text


def test_the_whole_steps_times_never_contradict_their_ratio() -> None:
    """On a busy machine medians taken apart may say that what is faster in pairs is slower."""
    ratio = GivenClock(1.25).compare(lambda: None, lambda: None, torch.device("cpu")).ratio
    fast = by(GivenClock(2.0), model())
    text = table(fast.sites, Verdict(250_000.0, 270_000.0, ratio), ())
    assert "Whole step: 250.00 ms before, 200.00 ms now; in pairs 1.25x as fast" in text


def test_the_table_says_once_that_an_op_is_slower() -> None:
    fast = by(GivenClock(0.5), nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)))
    assert [site.reason for site in fast.sites] == ["slower here"]
    text = str(fast)
    assert "not faster" in text
    assert "0.50x" in text
    assert "slower here" not in text


def test_a_model_with_nothing_in_it() -> None:
    assert "No module" in str(by(GivenClock(2.0), nn.Sequential(nn.Linear(8, 8))))


def test_a_real_clock_takes_pairs() -> None:
    verdict = Clock(pairs=3).compare(
        lambda: torch.randn(200, 200), lambda: torch.randn(2, 2), torch.device("cpu")
    )
    assert verdict.ratio.value > 1
    assert verdict.ratio.n == 3
    assert verdict.original_us > verdict.swapped_us > 0


def test_a_head_that_is_not_faster_with_its_loss_is_left() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.table(tokens)).flatten(0, 1), tokens.flatten())

    for ratio, status in ((2.0, "found"), (0.5, "not faster")):
        fast = by(GivenClock(ratio), Language(), torch.randint(50, (2, 7 if ratio > 1 else 8)))
        (site,) = (site for site in fast.sites if site.kind == "head_loss")
        assert site.status == status
        assert (fast.head is not None) == (status == "found")
        assert site.time_us is not None
        assert site.error is not None
        clock = GivenClock(3.0)
        assert by(clock, Language(), torch.randint(50, (2, 7 if ratio > 1 else 8))).sites == fast.sites
        assert clock.asked == 0


def test_what_cannot_be_recorded_now_is_timed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(call: pay.Call, device: torch.device) -> pay.Call:
        raise HeldGraphError

    monkeypatch.setattr(pay, "_captured", held)
    calls: list[pay.Call] = [lambda: 1, lambda: 2]
    clock = Clock(recorded=True)
    assert clock._both_captured(calls, torch.device("cpu")) == calls
    assert clock.held
    ((reason, count),) = clock.unrecorded.items()
    assert "still held" in reason
    assert count == 1


@pytest.mark.gpu
def test_under_autocast_calls_are_timed_as_graphs() -> None:
    device = torch.device("cuda")
    layer, x = nn.Linear(64, 64).to(device), torch.randn(8, 64, device=device)

    def call() -> object:
        return torch.autograd.grad(layer(x).sum(), [*layer.parameters()])

    with torch.autocast("cuda", torch.bfloat16):
        layer(x)  # leaves weights in 16 bits behind, with their nodes
        clock = Clock(recorded=True)
        recorded = clock._both_captured([call, call], device)
    assert not clock.unrecorded
    assert all(one is not call for one in recorded)
    for one in recorded:
        one()
