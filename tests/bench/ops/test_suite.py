"""The op suite on a processor, tiny: its cases, its records, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuseline import native
from fuseline.bench.ops import Effort, OpsBench, run
from fuseline.bench.ops import suite as suite_module
from fuseline.errors import InputError
from fuseline.ops import registered
from fuseline.records import read

CPU = torch.device("cpu")
ELEMENTS = {"bfloat16": 4096, "float16": 4096, "float32": 2048}


def bench(**options: object) -> OpsBench:
    settings: dict[str, object] = {
        "device": CPU,
        "lengths": (64, 5000),
        "elements": ELEMENTS,
        "effort": Effort(rounds=2, repeats=2),
        "peers": ("fuseline", "eager", "liger"),
    }
    return OpsBench(**{**settings, **options})  # type: ignore[arg-type]


def test_cases_are_every_op_at_every_dtype_and_length() -> None:
    cases = [(op.name, dtype, case.shape) for op, dtype, case in bench().cases()]
    assert cases == [
        (op.name, dtype, shape)
        for op in registered()
        for dtype, shapes in (
            (torch.bfloat16, [(64, 64), (1, 5000)]),
            (torch.float32, [(32, 64), (1, 5000)]),
        )
        for shape in shapes
    ]


def test_records_hold_share_of_the_copy_measured_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "ready", lambda device_type: False)
    monkeypatch.setattr(suite_module, "copy_bandwidth_gbs", lambda device: 8.0)
    records = run(bench(ops=("softmax",), dtypes=("float32",), lengths=(64,)), tmp_path, lambda *_: None)
    assert read(tmp_path / "ops.jsonl") == records
    assert [(r.peer, r.value) for r in records if r.case["op"] == "copy"] == [("copy", 8.0)]
    (absent,) = [r for r in records if r.metric == "skipped"]
    assert absent.peer == "liger"
    found = {(r.peer, r.case["direction"], r.metric): r for r in records if "direction" in r.case}
    assert {key[:2] for key in found} == {(p, d) for p in ("fuseline", "eager") for d in ("fw", "bw")}
    for (_, direction, metric), record in found.items():
        assert record.value is not None
        assert record.case == {
            "op": "softmax",
            "dtype": "float32",
            "native": False,
            "rows": 32,
            "n": 64,
            "direction": direction,
            "captured": False,
        }
        if metric == "bandwidth_gbs":
            time_us = found[record.peer, direction, "time_us"].value
            assert time_us is not None
            moved = 32 * 64 * 4 * (2 if direction == "fw" else 3)
            assert record.value == pytest.approx(moved / time_us / 1e3)
            share = found[record.peer, direction, "share_of_copy"].value
            assert share == pytest.approx(record.value / 8.0)
        if metric == "error":
            assert 0 < record.value < 1e-6
    assert ("eager", "fw", "paired_speedup") in found
    assert ("fuseline", "fw", "paired_speedup") not in found


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ops": ("sofmax",)}, r"no op named 'sofmax'\. Did you mean 'softmax'"),
        ({"dtypes": ("bfloat",)}, r"no dtype named 'bfloat'\. Did you mean 'bfloat16'"),
        ({"peers": ("eagre",)}, r"no peer named 'eagre'\. Did you mean 'eager'"),
        ({"lengths": (0,)}, "A row of length 0"),
        ({"lengths": ()}, "Nothing to measure"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(bench(**options).contenders)
