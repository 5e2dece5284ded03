"""What a climb of a kind of model goes over: where it begins, its rungs, and what torch alone is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fuseline.bench.ladder.rungs import NO_LEVER, RUNGS, Rung, find_rung
from fuseline.bench.ladder.spec import RunSpec
from fuseline.bench.ladder.torch_alone import rung_of, torch_alone


@dataclass(frozen=True)
class Course:
    """`torch_alone(best, machine, autotuned=False)` are the specs of the second baseline, and `rung_of` one
    of them as a rung. `visible_to_a_compiler(spec)` are rungs that put operations a compiler sees into in
    the place of kernels of ours."""

    baseline: Rung
    rungs: Sequence[Rung]
    torch_alone: Callable[..., Sequence[Any]]
    rung_of: Callable[[Any], Rung]
    visible_to_a_compiler: Callable[[Any], list[Rung]]

    def autotuned(self) -> Course:
        """The same, with max-autotune among what torch does alone."""
        return replace(self, torch_alone=partial(self.torch_alone, autotuned=True))


def _visible_to_a_compiler(spec: RunSpec) -> list[Rung]:
    names = {
        "torch-kernels": spec.kernels == "fuseline",
        "fp32-loss": spec.loss.startswith("fuseline"),
        "naive": spec.attention == "naive_fused",
    }
    return [_rung(name) for name, is_hidden in names.items() if is_hidden]


def _rung(name: str) -> Rung:
    found = find_rung(name)
    assert found is not None, name
    return found


GPT_COURSE = Course(
    baseline=Rung(
        name="plain PyTorch",
        slot="baseline",
        lever=NO_LEVER,
        summary="fp32, naive attention, torch's own AdamW and kernels, eager",
        change={},
        unavailable=lambda machine, spec: None,
    ),
    rungs=RUNGS,
    torch_alone=torch_alone,
    rung_of=rung_of,
    visible_to_a_compiler=_visible_to_a_compiler,
)
