"""Records of a comparison: every figure by hand, on an H100 that is only a name here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from fuseline.bench.compile.backends import BACKENDS
from fuseline.bench.compile.outcome import Measured, Outcome
from fuseline.bench.compile.results import _interval_of_mean, case_of, mean_speedups, records_of
from fuseline.bench.compile.workloads import PRESETS
from fuseline.records import Environment, Record
from fuseline.timing import Ratio, summarize

H100 = Environment("NVIDIA H100 80GB HBM3", "1980/2619 MHz", 500.0, "2.11.0", "13.0", "0.1.0", "abc")
PROCESSOR = Environment("a processor", None, None, "2.11.0", None, "0.1.0", "abc")
TIMES_MS = [10.0, 20.0, 10.0, 10.0, 20.0, 10.0, 10.0, 10.0, 10.0, 10.0]


def outcome(backend: str = "inductor", paired: Ratio | None = None) -> Outcome:
    waits = [0.0] * 9 + [6.0]
    return Outcome(BACKENDS[backend], Measured(TIMES_MS, waits, 30.0, 12.5, 0.001, paired))


def records(
    which: Outcome, model: str = "gpt2", environment: Environment = H100, price: float | None = None
) -> list[Record]:
    workload = PRESETS["full"][model]
    case = case_of(workload, "full", "bf16", "words", 50304)
    flops = {"mfu": 4.945e12, "mfu_causal": 2.4725e12}
    units = workload.source.units(workload.batch_size)
    return records_of(which, case, flops=flops, units=units, environment=environment, price_per_hour=price)


def by_metric(which: Sequence[Record]) -> dict[str, Record]:
    return {record.metric: record for record in which}


def test_a_mean_of_few_noisy_samples_has_a_positive_interval() -> None:
    low, high = _interval_of_mean(summarize([1.0, 1.0, 40.0]))
    assert 0 < low < 14 < high


def test_the_figures_of_a_backend() -> None:
    found = by_metric(records(outcome(paired=Ratio(1.25, 1.2, 1.3, 20)), price=3.6))
    sigma = math.sqrt((8 * 2.0**2 + 2 * 8.0**2) / 9)
    assert found["iteration_ms"].value == 10.0
    assert found["iteration_mean_ms"].value == 12.0
    assert found["iteration_sigma_ms"].value == pytest.approx(sigma)
    assert found["iteration_mean_ms"].high == pytest.approx(12 * math.exp(1.96 * sigma / 12 / math.sqrt(10)))
    assert found["tokens_per_s"].value == 16 * 1024 / 0.010
    # 4.945e12 FLOPs in 10 ms are half of 989 TFLOP/s, in 20 ms a quarter.
    assert found["mfu"].value == pytest.approx(0.8 * 0.5 + 0.2 * 0.25)
    assert found["mfu_sigma"].value == pytest.approx(math.sqrt((8 * 0.05**2 + 2 * 0.2**2) / 9))
    assert found["mfu_causal"].value == pytest.approx(0.225)
    assert found["data_wait_share"].value == pytest.approx(6 / 120)
    assert (found["compile_s"].value, found["peak_memory_gib"].value) == (30.0, 12.5)
    assert found["loss_error"].value == 0.001
    speedup = found["paired_speedup"]
    assert (speedup.value, speedup.low, speedup.high) == (1.25, 1.2, 1.3)
    # 3.6 an hour is 1e-3 a second, in which 1,638,400 tokens pass.
    assert found["cost_per_million_tokens"].value == pytest.approx(1e-3 / 1.6384)
    assert found["cost_per_million_tokens"].case["price_per_hour"] == 3.6
    assert all(r.case["rung"] == r.peer == "inductor" and r.n == 10 for r in found.values())
    assert found["mfu"].case["vocab"] == 50304


def test_eager_has_no_compile_time_and_an_unknown_peak_no_mfu() -> None:
    found = by_metric(records(outcome("eager"), environment=PROCESSOR))
    assert not {"compile_s", "mfu", "mfu_sigma", "mfu_causal", "cost_per_million_tokens"} & set(found)


def test_images_are_counted_by_the_sample() -> None:
    found = by_metric(records(outcome(), model="vit"))
    assert found["samples_per_s"].value == 6400
    assert found["samples_per_s"].case["data"] == "words"
    assert found["samples_per_s"].case["image_size"] == 224


def test_what_was_skipped_is_a_record_with_the_reason() -> None:
    (record,) = records(Outcome(BACKENDS["cudagraphs"], skipped="needs a CUDA device"))
    assert (record.metric, record.value, record.peer) == ("skipped", None, "cudagraphs")
    assert record.case["reason"] == "needs a CUDA device"


def test_the_mean_over_models_is_geometric_and_takes_the_last_record_of_each() -> None:
    def ratio(model: str, value: float, environment: Environment = H100) -> list[Record]:
        which = outcome(paired=Ratio(value, value / 1.1, value * 1.1, 20))
        return records(which, model=model, environment=environment)

    everything = [
        *ratio("gpt2", 9.0),
        *ratio("vit", 1.0),
        *ratio("lstm", 7.0, PROCESSOR),
        *ratio("gpt2", 4.0),
    ]
    (mean,) = mean_speedups(everything, H100)
    assert mean.value == pytest.approx(2.0)
    assert (mean.case["model"], mean.case["models"]) == ("geometric mean", "gpt2, vit")
    assert (mean.peer, mean.n) == ("inductor", 2)
    # Two independent intervals of 10% make one of 10% / sqrt(2).
    assert mean.high == pytest.approx(2.0 * 1.1 ** (1 / math.sqrt(2)))
    assert mean.low == pytest.approx(2.0 / 1.1 ** (1 / math.sqrt(2)))
    assert mean_speedups([*everything, mean], H100)[0].value == pytest.approx(2.0)
    assert mean_speedups(records(outcome("eager")), H100) == []
