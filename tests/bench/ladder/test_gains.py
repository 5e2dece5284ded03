"""Which rungs time is kept for: what the committed ladders of a GPU say."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuseline.bench.ladder.gains import LARGEST_GAINS, LARGEST_GAINS_OF_A_MODEL, is_kept_for
from fuseline.bench.ladder.model_spec import MODEL_RUNGS
from fuseline.bench.ladder.rungs import Rung, find_rung
from fuseline.records import read

RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "ladder-nvidia-h100-80gb-hbm3.jsonl.xz"


def test_the_list_for_a_gpu_is_what_the_records_say() -> None:
    best: dict[str, float] = {}
    for record in read(RECORDS):
        if record.metric == "paired_speedup" and record.case.get("mode") == "cumulative" and record.value:
            rung = str(record.case["rung"])
            best[rung] = max(best.get(rung, 0.0), record.value)
    large = [rung for rung, gain in sorted(best.items(), key=lambda item: -item[1]) if gain >= 1.1]
    assert list(LARGEST_GAINS["cuda"]) == large


def test_every_name_is_a_rung() -> None:
    assert all(find_rung(name) for names in LARGEST_GAINS.values() for name in names)
    assert set(LARGEST_GAINS_OF_A_MODEL) <= {rung.name for rung in MODEL_RUNGS}


@pytest.mark.parametrize(
    "later, rung, kept",
    [
        ("inductor", "padded-vocabulary", True),
        ("inductor", "bf16", False),  # a minute of compiling, where seconds gain as much
        ("inductor", "flash", True),
        ("fused-adamw", "flash", True),
        ("flash", "fused-adamw", False),
        ("fused-adamw", "padded-vocabulary", True),
        ("fused-loss", "padded-vocabulary", False),
        ("inductor", "inductor", False),
    ],
)
def test_time_is_kept_for_what_gains_more(later: str, rung: str, kept: bool) -> None:
    def named(name: str) -> Rung:
        found = find_rung(name)
        assert found is not None
        return found

    assert is_kept_for(named(later), named(rung), "cpu") is kept
