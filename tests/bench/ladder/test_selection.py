"""Names made into things to run."""

from __future__ import annotations

import pytest

from fuseline.bench.ladder.rungs import NO_LEVER, RUNGS
from fuseline.bench.ladder.selection import select
from fuseline.errors import InputError


def _names(selection):
    return [rung.name for rung in selection.rungs]


def test_a_cpu_climbs_what_it_has_of_its_own() -> None:
    on_cpu, on_gpu = (set(_names(select((), "cumulative", "tiny", device))) for device in ("cpu", "cuda:1"))
    named = {"math", "linear-loss", "fuseline-kernels"}
    assert on_gpu - on_cpu == {"auto", "pick", "fuseline-attention"} | named
    assert _names(select(("auto",), "cumulative", "tiny", "cpu")) == ["auto"]


def test_no_names_are_all_rungs_that_change_something():
    selection = select((), "cumulative", "gpt2")
    assert _names(selection) == [rung.name for rung in RUNGS if rung.lever != NO_LEVER]
    assert not selection.combinations


def test_slots_and_rungs_come_in_the_order_of_the_climb():
    assert _names(select(("inductor", "vocabulary", "bf16", "fp32"), "cumulative", "tiny")) == [
        "bf16",
        "padded-vocabulary",
        "inductor",
    ]


def test_combinations_may_stand_beside_rungs():
    selection = select(("seed-001", "optimizer", "seed-001"), "alone", "gpt2")
    assert [c.name for c in selection.combinations] == ["seed-001"]
    assert _names(selection) == ["fused-adamw"]


def test_the_mode_combination_runs_what_fits_the_preset():
    assert [c.name for c in select((), "combination", "gpt2").combinations] == [
        "seed-001",
        "seed-003",
        "anchors",
    ]
    assert "anchors" not in [c.name for c in select((), "combination", "tiny").combinations]


@pytest.mark.parametrize(
    "names, mode, said",
    [
        (("flahs",), "cumulative", "Did you mean 'flash'"),
        (("seed-01",), "cumulative", "'seed-001'"),
        (("bf16",), "combination", "--mode cumulative"),
        (("fp32", "eager"), "cumulative", "stands already"),
        ((), "cumulativ", "Did you mean 'cumulative'"),
    ],
)
def test_what_is_not_there_is_told(names, mode, said):
    with pytest.raises(InputError, match=said):
        select(names, mode, "gpt2")
