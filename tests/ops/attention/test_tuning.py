"""Problems are measured, on request or at their first call; what is kept, and what a problem is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fuseline
from fuseline.errors import InputError
from fuseline.ops import attention
from fuseline.ops.attention import choice, table_store
from fuseline.ops.attention.choice import decide
from fuseline.ops.attention.measure import Times, measure
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.work import bytes_moved, flops

BASE = Problem(torch.device("cpu"), torch.float32, 2, 4, 4, 64, 64, 32)
picker = fuseline.picker

pytestmark = pytest.mark.usefixtures("nothing_is_remembered")


def short_qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(3, 2, 4, 8, 32)
    return q, k, v


def test_tuning_keeps_what_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(table_store, "gpu_name", lambda device: "a-gpu")
    small = replace(BASE, seqlen_q=8, seqlen_k=8)
    seen: list[tuple[int, int]] = []
    (entry,) = picker.tune([small, small], observe=lambda now, done, total: seen.append((done, total)))
    assert set(entry.times_us) >= {"flash", "math"}
    assert seen == [(0, 1), (1, 1)]
    decision = decide(small)
    assert decision.why == "the fastest measured on this machine"
    assert decision.name == entry.fastest
    assert decide(replace(small, batch=3)).why.startswith("the fastest as estimated from 1 measured problem")


def test_a_new_shape_is_measured_before_its_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(table_store, "gpu_name", lambda device: "a-gpu")
    q, k, v = short_qkv()
    attention(q, k, v)
    assert table_store.measured_here("a-gpu").entries == {}
    with picker.tuning():
        attention(q, k, v)
        attention(q, k, v)
        attention(q, k, v, backend="math", causal=True)
    (entry,) = table_store.measured_here("a-gpu").entries.values()
    assert (entry.problem.seqlen_q, entry.problem.causal) == (8, "none")
    assert picker.explain(q, k, v).why == "the fastest measured on this machine"
    assert choice.SETTINGS.tune is None


def test_tuning_leaves_the_generators_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(table_store, "gpu_name", lambda device: "a-gpu")
    before = torch.get_rng_state()
    picker.tune([replace(BASE, seqlen_q=8, seqlen_k=8, direction="fwbw", dropout_p=0.5)])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shape_without_memory_to_measure_it_is_picked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_store, "gpu_name", lambda device: "a-gpu")

    def full(problem: Problem) -> None:
        raise torch.OutOfMemoryError("no memory")

    q, k, v = short_qkv()
    with picker.tuning():
        monkeypatch.setattr(choice.SETTINGS, "tune", full)
        with pytest.warns(UserWarning, match="no memory to measure B=2 H=4 T=8"):
            out = attention(q, k, v)
        assert choice.SETTINGS.tune is full, "the next shape may fit"
    torch.testing.assert_close(out, attention(q, k, v, backend="math"), rtol=1e-5, atol=1e-5)


def test_tuning_wants_a_gpu() -> None:
    with pytest.raises(InputError, match="Times are kept for GPUs; cpu is not one"):
        picker.tune([BASE])


def test_measuring_says_why_others_were_not() -> None:
    times = measure(replace(BASE, direction="fwbw", seqlen_q=8, seqlen_k=8))
    assert isinstance(times, Times)
    assert times.failed["cudnn"] == "it is a CUDA kernel; the device is cpu"
    assert min(times.times_us.values()) > 0


def test_flops_and_bytes_count_what_must_be_done() -> None:
    assert flops(BASE) == 4 * 2 * 4 * 64 * 64 * 32
    causal = replace(BASE, causal="bottom_right")
    assert flops(causal) == pytest.approx(4 * 2 * 4 * (64 * 65 / 2) * 32)
    assert flops(replace(causal, direction="fwbw")) == pytest.approx(3.5 * flops(causal))
    windowed = replace(causal, window_left=15)
    assert flops(windowed) == pytest.approx(4 * 2 * 4 * (64 * 16 - 15 * 16 / 2) * 32)
    one = 2 * 4 * 64 * 32 * 4
    assert bytes_moved(BASE) == 4 * one
    assert bytes_moved(replace(BASE, direction="fwbw")) == 12 * one
    padded = replace(BASE, mask="bool", mask_dims="bs", kv_heads=1)
    assert bytes_moved(padded) == 2 * one + 2 * one / 4 + 2 * 64
