"""The probes on a processor: chains visit every place, elementwise kernels are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseline import native
from fuseline.bench.hardware import latency
from fuseline.bench.hardware.probes import FOUR_SINES, RELU_FP32, RELU_INT8, address_chain, load_probes

CPU = torch.device("cpu")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
pytestmark = pytest.mark.skipif(
    native.compilers()["cxx"].compiler is None, reason="needs a C++ compiler, and none was found"
)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def probes() -> Any:
    return load_probes()


def test_a_chain_is_one_cycle_through_every_place(device: torch.device) -> None:
    chain = address_chain(count=50, stride=3, device=device, seed=1)
    at, seen = chain.data_ptr(), set()
    for _ in range(50):
        seen.add((at - chain.data_ptr()) // 8)
        at = int(chain[(at - chain.data_ptr()) // 8])
    assert at == chain.data_ptr()
    assert seen == set(range(0, 150, 3))


def test_a_chase_ends_where_the_chain_says(device: torch.device, probes: Any) -> None:
    chain = address_chain(count=64, stride=2, device=device, seed=2)
    result = torch.zeros(3, dtype=torch.int64, device=device)
    probes.chase(chain, 70, 64, 0, result)  # 134 loads, two rounds and six
    at = chain.data_ptr()
    for _ in range(6):
        at = int(chain[(at - chain.data_ptr()) // 8])
    assert int(result[0]) == at
    assert int(result[2]) > 0


@pytest.mark.parametrize(
    "kind, dtype", [(RELU_FP32, "float32"), (RELU_INT8, "int8"), (FOUR_SINES, "float32")]
)
def test_elementwise_is_what_torch_computes(device: torch.device, probes: Any, kind: int, dtype: str) -> None:
    x = torch.randint(-120, 120, (4096 + 48,), device=device).to(getattr(torch, dtype))
    wanted = x.sin().sin().sin().sin() if kind == FOUR_SINES else x.relu()
    torch.testing.assert_close(probes.elementwise(x, kind), wanted)


@pytest.mark.parametrize(
    "kind, message", [(7, "no kind 7"), (RELU_INT8, "takes Char"), (RELU_FP32, "16 bytes")]
)
def test_what_a_probe_cannot_take_is_refused(
    device: torch.device, probes: Any, kind: int, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        probes.elementwise(torch.zeros(5, device=device), kind)


def test_near_memory_answers_before_far_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "RUNS", 2)
    near, *_, far = latency.measure(CPU, load_probes(), seed=0)
    assert (near.what, near.metric, far.what) == ("L1", "latency_ns", "memory")
    assert near.value is not None
    assert far.value is not None
    assert 0.2 < near.value < far.value
