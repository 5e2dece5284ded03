"""One case measured: the right call is timed, the wrong peer is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from fuseline.bench.ops.measure import CaseResult, Effort, measure_case
from fuseline.bench.peers import PEERS, Peer, UnsupportedError
from fuseline.ops import Case, Op, get

CPU = torch.device("cpu")
EFFORT = Effort(rounds=2, repeats=3)


class Other:
    """A peer that does what it is told to with the true result."""

    name = "other"

    def __init__(self, twist: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.twist = twist

    def why_not(self, device: torch.device) -> str | None:
        return None

    def version(self) -> str:
        return "1"

    def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], torch.Tensor]:
        return lambda: self.twist(op.reference(**inputs))


def measure(*peers: Peer, device: torch.device = CPU) -> dict[str, CaseResult]:
    case = Case("16x32", (16, 32))
    results = measure_case(get("softmax"), case, torch.float32, peers, device, 0, EFFORT)
    return {result.peer.name: result for result in results}


def test_every_peer_is_timed_both_ways_and_paired_with_ours() -> None:
    found = measure(PEERS["fuseline"], PEERS["eager"])
    for result in found.values():
        assert [(t.direction, t.captured) for t in result.timings] == [("fw", False), ("bw", False)]
        assert [t.bytes_moved for t in result.timings] == [16 * 32 * 4 * 2, 16 * 32 * 4 * 3]
        assert all(t.time_us.median > 0 and t.time_us.n == 2 for t in result.timings)
        assert result.errors is not None
        assert result.errors.worst < 1e-6
    assert [t.paired for t in found["fuseline"].timings] == [None, None]
    forward, ours = found["eager"].timings[0], found["fuseline"].timings[0]
    assert forward.paired is not None
    # Of two rounds: the median of the two ratios lies between those of the slowest and the fastest.
    assert forward.time_us.low / ours.time_us.high <= forward.paired.value
    assert forward.paired.value <= forward.time_us.high / ours.time_us.low


def test_a_peer_that_computes_something_else_is_not_timed() -> None:
    result = measure(Other(lambda y: 1.5 * y))["other"]
    assert result.skipped == "computes something else: error 0.5 against float64"
    assert result.timings == []


def test_a_peer_without_the_op_and_one_that_breaks_leave_their_reasons() -> None:
    def unsupported(y: torch.Tensor) -> torch.Tensor:
        raise UnsupportedError("other has no softmax")

    def broken(y: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shared memory exceeded\nby far")

    assert measure(Other(unsupported))["other"].skipped == "other has no softmax"
    assert measure(Other(broken))["other"].skipped == "failed with RuntimeError: shared memory exceeded"


def test_forward_is_timed_without_a_graph_and_backward_without_a_forward() -> None:
    graphs = []

    def note(y: torch.Tensor) -> torch.Tensor:
        graphs.append(y.requires_grad)
        return y

    measure(Other(note))
    # Once for the errors; 2 rounds of 2 warm-ups and 3 repeats; once to go back from.
    assert graphs == [True] + [False] * 10 + [True]


@pytest.mark.gpu
def test_short_calls_are_timed_in_a_graph_as_well() -> None:
    for result in measure(PEERS["eager"], device=torch.device("cuda")).values():
        assert [(t.direction, t.captured) for t in result.timings] == [
            ("fw", False),
            ("bw", False),
            ("fw", True),
            ("fwbw", True),
        ]
        forward, both = result.timings[2:]
        assert 0 < forward.time_us.median < both.time_us.median
