"""One case measured: the right call is timed, the wrong peer is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fuseline.bench.ops import measure as measure_module
from fuseline.bench.ops.bound import Computation, bind_inputs
from fuseline.bench.ops.measure import CaseResult, Effort, measure_case
from fuseline.bench.peers import PEERS, Peer, UnsupportedError
from fuseline.ops import Case, Op, get
from fuseline.timing import Summary, summarize

CPU = torch.device("cpu")
EFFORT = Effort(rounds=2, repeats=3)


class Other:
    """A peer that does what it is told to with the true result."""

    name = "other"
    overwrites = False
    compiles = False

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


@pytest.mark.parametrize(("us", "rests"), [(2000.0, {0.02}), (200.0, {None})], ids=["long", "short"])
def test_the_device_rests_equally_long_before_long_calls(
    monkeypatch: pytest.MonkeyPatch, us: float, rests: set[float | None]
) -> None:
    given: set[float | None] = set()

    def time(
        call: object, device: object, *, repeats: int, warmup: int, head_start: float | None = None
    ) -> Summary:
        if warmup == 1:  # a round, not the first look
            given.add(head_start)
        return summarize([us])

    queued = iter([0.004, 0.020, 0.004, 0.020])  # by ours and the other, forward and backward
    monkeypatch.setattr(measure_module, "time_calls", time)
    monkeypatch.setattr(measure_module, "queue_seconds", lambda call, device: next(queued))
    effort = Effort(rounds=3, repeats=1)
    peers = PEERS["fuseline"], PEERS["eager"]
    measure_case(get("softmax"), Case("16x32", (16, 32)), torch.float32, peers, CPU, 0, effort)
    assert given == rests


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


def test_forward_is_timed_without_a_graph_and_backward_without_a_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure_module, "LONG_US", float("inf"))
    graphs = []

    def note(y: torch.Tensor) -> torch.Tensor:
        graphs.append(y.requires_grad)
        return y

    measure(Other(note))
    # Once for the errors; 3 calls to see how long one takes; 2 rounds of a warm-up and 3 repeats; once to go
    # back from.
    assert graphs == [True] + [False] * (3 + 2 * 4) + [True]


def test_a_loss_is_timed_forward_and_both_ways_together() -> None:
    loss = replace(
        get("softmax"),
        name="cross_entropy",
        function=lambda x, **_: x.logsumexp(-1).mean(),
        reference=lambda x, **_: x.logsumexp(-1).mean(),
    )
    (result,) = measure_case(
        loss, Case("16x32", (16, 32)), torch.float32, [PEERS["fuseline"]], CPU, 0, EFFORT
    )
    assert [t.direction for t in result.timings] == ["fw", "fwbw"]
    # With the gradient written in the forward pass both move no more than a backward pass alone.
    assert [t.bytes_moved for t in result.timings] == [16 * 32 * 4 * 2, 16 * 32 * 4 * 3]


def test_a_peer_that_overwrites_gets_copies_of_inputs_and_gradients() -> None:
    class Overwriting(Other):
        name = "overwriting"
        overwrites = True

        def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], torch.Tensor]:
            def call() -> torch.Tensor:
                y = op.reference(**inputs)
                inputs["x"].data.zero_()
                return y

            return call

    case = bind_inputs(get("softmax"), Case("16x32", (16, 32)), torch.float32, CPU, 0)
    before = case.inputs["x"].detach().clone()
    Computation.of(Overwriting(lambda y: y), case).forward_and_backward()
    assert torch.equal(case.inputs["x"], before)
    found = measure(PEERS["fuseline"], Overwriting(lambda y: y))
    assert found["overwriting"].skipped is None
    assert found["overwriting"].errors is not None
    assert found["overwriting"].errors.worst < 1e-6


def test_long_calls_are_repeated_less() -> None:
    effort = Effort(rounds=6, repeats=10)
    assert [effort.repeats_of(us) for us in (10.0, 1e3, 2e3, 1e6)] == [10, 10, 5, 2]


@pytest.mark.parametrize("disturbed, rounds", [((), 6), ((2,), 9), (range(15), 15)])
def test_rounds_that_disagree_are_followed_by_more(disturbed: Sequence[int], rounds: int) -> None:
    taken: list[int] = []

    def clock() -> Summary:
        taken.append(len(taken))
        return summarize([10.0 + (taken[-1] if taken[-1] in disturbed else 0.0)])

    steady = summarize([5.0])
    clocks = {"one": clock, "other": lambda: steady}
    medians = measure_module._take_turns(clocks, Effort(6, 10, most_rounds=15))
    assert len(medians["one"]) == len(medians["other"]) == rounds


@pytest.mark.gpu
def test_short_calls_are_timed_in_a_graph_as_well() -> None:
    for result in measure(PEERS["eager"], device=torch.device("cuda")).values():
        assert [(t.direction, t.captured) for t in result.timings] == [
            ("fw", False),
            ("bw", False),
            ("fw", True),
            ("bw", True),
        ]
        eager, captured = result.timings[0], result.timings[2]
        assert 0 < captured.time_us.median < eager.time_us.median
