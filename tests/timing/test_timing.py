"""Statistics against cases worked by hand, clocks against work of a known length."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from fuseline.timing import (
    copy_bandwidth_gbs,
    flops_per_token,
    geometric_mean,
    hardware,
    host_time_us,
    mfu,
    paired_ratio,
    peak_flops,
    queue_seconds,
    ran_out_of_memory,
    summarize,
    time_calls,
    time_captured,
    time_steps,
)

CPU = torch.device("cpu")


def test_the_interval_covers_the_median_95_percent_of_the_time():
    rng = np.random.default_rng(0)
    hits = [s.low <= 0.0 <= s.high for s in (summarize(rng.normal(size=25)) for _ in range(2000))]
    assert 0.94 <= np.mean(hits) <= 0.99


def test_a_summary_worked_by_hand():
    s = summarize([3.0, 1.0, 2.0])
    assert (s.median, s.low, s.high, s.mean, s.sigma, s.n) == (2.0, 1.0, 3.0, 2.0, 1.0, 3)


def test_one_disturbed_sample_of_nine_lies_outside_the_interval():
    s = summarize([20.0, 21.0, 22.0, 23.0, 24.0, 25.0, 26.0, 27.0, 2700.0])
    assert (s.median, s.low, s.high) == (24.0, 21.0, 27.0)  # the 2nd and the 8th: 96.1%
    assert summarize(range(20)).low == 5  # the 6th: 95.9%, where the 7th has 88.5%


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        summarize([])


def test_a_paired_ratio_is_blind_to_drift_that_hits_both():
    drift = np.linspace(1.0, 3.0, 40)
    ratio = paired_ratio(2.0 * drift, drift)
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low == pytest.approx(2.0)
    assert ratio.high == pytest.approx(2.0)


def test_a_paired_ratio_refuses_samples_that_do_not_pair():
    with pytest.raises(ValueError, match="as many"):
        paired_ratio([1.0, 2.0], [1.0])


def test_geometric_mean():
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_flops_of_gpt2_match_nanogpt():
    # 123.59M non-embedding parameters, 12 layers, 768 wide, 1024 tokens: nanoGPT's estimate_mfu.
    palm = flops_per_token(123_587_328, 12, 768, 1024)
    assert palm == 6 * 123_587_328 + 12 * 12 * 12 * 64 * 1024
    assert flops_per_token(123_587_328, 12, 768, 1024, "mfu_causal") == palm - 6 * 12 * 768 * 1024


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA H100 NVL", None),
        ("AMD EPYC (2 threads)", None),
    ],
)
def test_peaks_are_known_or_said_not_to_be(name, tflops):
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)
    assert (mfu(1e14, name) is None) == (tflops is None)


def test_clocks_measure_a_sleep():
    def nap() -> None:
        time.sleep(0.002)

    assert 2000 <= time_calls(nap, CPU, repeats=5, warmup=1).median < 20_000
    assert 2000 <= host_time_us(nap, CPU, calls=3, runs=2).median < 20_000
    assert 2.0 <= time_steps(nap, CPU, steps=3) < 20.0


def test_copy_bandwidth_is_a_plausible_number():
    assert 0.1 < copy_bandwidth_gbs(CPU, size_bytes=2**22) < 2000


def test_a_round_of_copies_beside_other_work_is_not_the_ceiling(monkeypatch):
    rounds = iter([2.0, 1.0, 3.0])
    monkeypatch.setattr(hardware, "time_calls", lambda *_, **__: summarize([next(rounds)]))
    assert copy_bandwidth_gbs(CPU, size_bytes=1000) == pytest.approx(2.0)


@pytest.mark.gpu
def test_captured_and_single_calls_agree_on_a_long_operation():
    device = torch.device("cuda")
    tensors = [torch.randn(2**26, device=device) for _ in range(2)]
    calls = [lambda t=t: t.mul_(1.0001) for t in tensors]
    single = time_calls(calls[0], device).median
    captured = time_captured(calls, device).median
    assert captured == pytest.approx(single, rel=0.15)
    assert single == pytest.approx(2 * 2**28 / 3000e3, rel=0.5)


@pytest.mark.gpu
def test_a_slow_host_is_not_timed() -> None:
    device = torch.device("cuda")
    x = torch.ones(1024, device=device)

    def slow() -> torch.Tensor:
        time.sleep(2e-3)
        return x + 1

    assert time_calls(slow, device, repeats=5, warmup=2).median < 500
    assert queue_seconds(slow, device) > 2e-3
    assert time_calls(slow, device, repeats=5, warmup=0, head_start=5 * 3e-3).median < 500


def test_want_of_memory_is_seen_behind_another_error() -> None:
    full = torch.OutOfMemoryError("full")
    host = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
    device = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    for error in (full, host, device):
        recording = RuntimeError("operation not permitted when stream is capturing")
        recording.__context__ = error
        outer = ValueError("it could not be recorded")
        outer.__cause__ = recording
        assert ran_out_of_memory(error)
        assert ran_out_of_memory(outer)
    assert not ran_out_of_memory(RuntimeError("an illegal memory access"))
