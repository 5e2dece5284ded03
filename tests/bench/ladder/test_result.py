"""Results as records, and back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuseline.bench.ladder.result import Figure, Measurement, RungResult, ratio, recorded
from fuseline.records import Record, describe


@pytest.fixture
def result(base) -> RungResult:
    figures = {"iteration_ms": Figure(10.0, 9.0, 11.0, 5), "paired_speedup": Figure(2.0, 1.9, 2.1, 5)}
    return RungResult(
        name="bf16",
        slot="precision",
        lever="tensor cores",
        mode="cumulative",
        order=2,
        spec=base.with_({"precision": "bf16"}),
        measurement=Measurement(
            figures=figures,
            kernels="1 ms x2 gemm",
            work={"products": 2.0, "copies and casts": 0.5},
            note="a note",
        ),
        baseline="plain PyTorch",
        kept=True,
        gained=(("products", 9.0), ("waiting", 1.5)),
    )


def test_records_name_the_run_and_carry_intervals(result):
    time_ms, paired, kernels = result.records(describe("cpu"))
    assert (time_ms.metric, time_ms.value, time_ms.low, time_ms.high, time_ms.n) == (
        "iteration_ms",
        10.0,
        9.0,
        11.0,
        5,
    )
    assert time_ms.case["rung"] == "bf16"
    assert time_ms.case["dtype"] == "bf16"
    assert time_ms.case["kept"] is True
    assert paired.case["baseline"] == "plain PyTorch"
    assert (kernels.metric, kernels.value, kernels.case["names"]) == ("kernels", None, "1 ms x2 gemm")


def test_a_rung_names_the_work_in_which_it_gained(result):
    work = {"products": 11.0, "norms": 3.0, "pointwise": 0.01, "copies and casts": 0.4, "loss": 2.0}
    figures = {"iteration_ms": Figure(20.0)}
    slower = replace(result, measurement=Measurement(figures=figures, work=work), gained=())
    # 20 - 16.41 ms without a kernel there, 10 - 2.5 here: that and the casts took longer.
    assert result.ahead_of(slower).gained == (("products", 9.0), ("norms", 3.0), ("loss", 2.0))
    assert slower.ahead_of(replace(slower, measurement=Measurement(figures=figures))).gained == ()


def test_they_can_be_read_back(result):
    written = [Record.from_json(r.to_json()) for r in result.records(describe("cpu"))]
    (read,) = recorded(written, written[0].device, written[0].torch).values()
    assert read == result


def test_what_another_machine_or_torch_measured_is_not_ours(result):
    written = result.records(describe("cpu"))
    assert recorded(written, "another", written[0].torch) == {}
    assert recorded(written, written[0].device, "1.0") == {}


def test_a_skipped_rung_is_one_record_with_its_reason_and_is_tried_again(base):
    skipped = RungResult(
        "tf32", "precision", "tensor cores", "alone", 1, base, Measurement(reason="no tensor cores")
    )
    (record,) = skipped.records(describe("cpu"))
    assert (record.metric, record.value, record.case["reason"]) == ("skipped", None, "no tensor cores")
    assert recorded([record], record.device, record.torch) == {}


def test_records_of_sections_and_of_other_ladders_are_passed_over(result):
    environment = describe("cpu")
    section = Record.of("ladder", {"section": "curve", "step": 1}, "loss", 2.0, environment)
    foreign = Record.of("ladder", {"rung": "x"}, "iteration_ms", 2.0, environment)
    assert recorded([section, foreign], section.device, section.torch) == {}


def test_the_interval_of_a_ratio_is_the_widest_both_allow():
    assert ratio(Figure(10, 8, 12, 5), Figure(5, 4, 6, 7)) == Figure(2.0, 8 / 6, 3.0, 5)
