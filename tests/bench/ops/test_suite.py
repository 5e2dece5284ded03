"""The op suite on a processor, tiny: its cases, its records, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuseline import native
from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ops import Effort, OpsBench, run
from fuseline.bench.ops import suite as suite_module
from fuseline.bench.ops.bound import bind_inputs
from fuseline.bench.ops.measure import BrokenDeviceError, CaseResult, measure_case
from fuseline.bench.ops.plan import Place
from fuseline.bench.peers import PEERS
from fuseline.errors import InputError
from fuseline.native.kernels import NORMS
from fuseline.ops import get, registered
from fuseline.records import read

CPU = torch.device("cpu")
ELEMENTS = {"bfloat16": 4096, "float16": 4096, "float32": 2048}


@pytest.fixture
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No build of the native library, no copy of a large buffer."""
    monkeypatch.setattr(native, "ready", lambda device_type: False)
    monkeypatch.setattr(suite_module, "copy_bandwidth_gbs", lambda device: 10.0)


def bench(**options: object) -> OpsBench:
    settings: dict[str, object] = {
        "device": CPU,
        "lengths": (64, 5000),
        "elements": ELEMENTS,
        "effort": Effort(rounds=2, repeats=2),
        "peers": ("fuseline", "eager", "liger"),
    }
    return OpsBench(**{**settings, **options})  # type: ignore[arg-type]


def test_places_are_every_op_at_every_dtype_and_length() -> None:
    places = [(place.op.name, place.dtype_name, place.rows, place.n) for place in bench().places()]
    assert places == [
        (op.name, name, rows, n)
        for op in registered()
        for name, sizes in (("bfloat16", [(64, 64), (1, 5000)]), ("float32", [(32, 64), (1, 5000)]))
        for rows, n in sizes
    ]


def test_mixed_precision_is_a_float32_stream_beside_branches_of_16_bits() -> None:
    places = [*bench(dtypes=("bfloat16", "mixed"), elements={"bfloat16": 64, "mixed": 64}).places()]
    mixed = [place for place in places if place.mixed]
    assert {place.op.name for place in mixed} == set(NORMS)
    assert all(place.key()["dtype"] == "mixed" and place.dtype is torch.bfloat16 for place in mixed)
    (place,) = [place for place in mixed if (place.op.name, place.n) == ("add_layer_norm", 64)]
    inputs = bind_inputs(place.op, place.case, place.dtype, CPU, 0).inputs
    found = {name: inputs[name].dtype for name in ("x", "residual", "weight")}
    assert found == {"x": torch.bfloat16, "residual": torch.float32, "weight": torch.float32}


def test_rows_given_are_measured_in_graphs_alone_and_an_ops_own_lengths_stand_for_the_general_ones() -> None:
    few = bench(ops=("softmax",), dtypes=("float32",), rows=(4, 32), lengths=(64,))
    assert [(place.rows, place.n) for place in few.places()] == [(4, 64), (32, 64)]
    assert few.only_captured
    vocabulary = replace(get("softmax"), name="own_lengths", lengths=(100, 200))
    place = Place(vocabulary, torch.float32, 3, 100)
    assert place.case.shape == (3, 100)
    assert bench(own_lengths=True)._lengths_of(vocabulary) == (100, 200)
    assert bench()._lengths_of(vocabulary) == (64, 5000)


def test_drawn_lengths_stand_behind_those_that_are_listed_and_are_marked() -> None:
    some = bench(ops=("softmax",), dtypes=("float32",), drawn=3)
    listed, drawn = [*some.places()][:2], [*some.places()][2:]
    assert [place.n for place in listed] == [64, 5000]
    assert not any("drawn" in place.key() for place in listed)
    assert len(drawn) == 3
    assert all(64 < place.n < 5000 and place.key()["drawn"] is True for place in drawn)
    again = bench(ops=("softmax",), dtypes=("float32",), drawn=3)
    assert [*again.places()] == [*some.places()]
    others = bench(ops=("softmax",), dtypes=("float32",), drawn=3, seed=7)
    assert [*others.places()][2:] != drawn
    of_its_own = bench(ops=("rope",), dtypes=("float32",), drawn=3, own_lengths=True)
    assert all(place.n % 16 == 0 and place.n < 256 for place in [*of_its_own.places()][-3:])
    with pytest.raises(InputError, match="--drawn -1"):
        bench(drawn=-1)


def test_errors_of_a_matrix_too_large_for_float64_are_taken_on_fewer_rows() -> None:
    assert Place(get("softmax"), torch.float32, 4096, 65536).checked is None
    checked = Place(get("softmax"), torch.float32, 8192, 131072).checked
    assert checked is not None
    assert checked.shape == (2048, 131072)


def test_all_shapes_that_a_peer_meets_are_compiled_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [Place(get("softmax"), torch.float32, rows, n) for rows, n in ((8192, 131072), (4, 64))]
    shapes = [(place.rows, place.n) for place in suite_module._compiled(bench(), places)]
    assert shapes == [(8192, 131072), (4, 64), (2048, 131072)]
    monkeypatch.setattr(suite_module, "_times_host", lambda bench: True)
    where_the_host_is_timed = suite_module._compiled(bench(), places)[-1]
    assert (where_the_host_is_timed.rows, where_the_host_is_timed.n) == (8, 1024)


def test_records_hold_share_of_the_copy_measured_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "ready", lambda device_type: False)
    monkeypatch.setattr(suite_module, "copy_bandwidth_gbs", lambda device: 8.0)
    one = bench(ops=("softmax",), dtypes=("float32",), lengths=(64,))
    records = run(one, tmp_path, lambda *_: None).records
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


@pytest.mark.usefixtures("quick_machine")
def test_a_run_that_resumes_measures_what_is_missing(tmp_path: Path) -> None:
    options = {"ops": ("softmax",), "dtypes": ("float32",), "peers": ("fuseline", "eager")}
    run(bench(**options, lengths=(64,)), tmp_path, lambda *_: None)
    seen: list[str] = []
    outcome = run(
        bench(**options, lengths=(64, 128), resume=True), tmp_path, lambda now, *_: seen.append(now)
    )
    assert seen == ["copy bandwidth", "softmax float32 16 x 128", "done"]
    assert {r.case["n"] for r in outcome.records if "n" in r.case} == {128}


@pytest.mark.usefixtures("quick_machine")
def test_cases_that_the_budget_leaves_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 0.0

    def measured(*arguments: object, **options: object) -> list[CaseResult]:
        nonlocal seconds
        seconds += 60.0
        return measure_case(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(suite_module, "measure_case", measured)
    monkeypatch.setattr(suite_module, "Budget", lambda total: Budget(total, lambda: seconds))
    one = bench(ops=("softmax",), dtypes=("float32",), budget_seconds=90.0)
    outcome = run(one, tmp_path, lambda *_: None)
    assert [place.words() for place in outcome.left] == ["softmax float32 1 x 5000"]
    assert {r.case["n"] for r in outcome.records if "n" in r.case} == {64}


@pytest.mark.usefixtures("quick_machine")
def test_a_peer_that_breaks_the_device_is_left_out_when_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(*_: object, **__: object) -> None:
        raise BrokenDeviceError(PEERS["eager"], "illegal address")

    one = bench(
        ops=("softmax",), dtypes=("float32",), lengths=(64,), peers=("fuseline", "eager"), resume=True
    )
    with monkeypatch.context() as patched:
        patched.setattr(suite_module, "measure_case", breaking)
        with pytest.raises(InputError, match="eager broke the device's context: illegal address"):
            run(one, tmp_path, lambda *_: None)
    outcome = run(one, tmp_path, lambda *_: None)
    assert {r.peer for r in outcome.records if r.metric == "time_us"} == {"fuseline"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ops": ("sofmax",)}, r"no op named 'sofmax'\. Did you mean 'softmax'"),
        ({"dtypes": ("bfloat",)}, r"no dtype named 'bfloat'\. Did you mean 'bfloat16'"),
        ({"peers": ("eagre",)}, r"no peer named 'eagre'\. Did you mean 'eager'"),
        ({"lengths": (0,)}, "A row of length 0"),
        ({"lengths": ()}, "Nothing to measure"),
        ({"rows": (0,)}, "0 rows are none"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(bench(**options).contenders)


def test_the_host_is_timed_forward_and_with_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_module, "HOST_CALLS", 2)
    monkeypatch.setattr(suite_module, "HOST_RUNS", 2)
    peers = [PEERS["fuseline"], PEERS["eager"]]
    records = []
    for op in ("softmax", "quant_linear"):
        place = Place(get(op), torch.float32, 4, 64)
        records += suite_module._host_records(bench(), place, peers, is_native=False)
    assert {r.metric for r in records} == {"host_us"}
    of_softmax = [(r.case["direction"], r.peer) for r in records if r.case["op"] == "softmax"]
    assert of_softmax == [("fw", "fuseline"), ("fw", "eager"), ("fwbw", "fuseline"), ("fwbw", "eager")]
    assert all(r.value > 0 and r.n == 2 for r in records if r.value is not None)
