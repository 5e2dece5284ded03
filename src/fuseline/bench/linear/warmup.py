"""What contenders compile of products, compiled by several processes before any of these is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from fuseline.bench.compiling import Compilers, Task, briefly_shared, one_task, timed_briefly
from fuseline.bench.linear.contenders import make_calls
from fuseline.bench.linear.problems import Problem

Wanted = tuple[str, Problem]
"""A contender and what it is to compute."""


def compile_products(
    compilers: Compilers,
    wanted: Sequence[Wanted],
    observe: Callable[[int, int], None],
    within: float = math.inf,
) -> None:
    """Run each once, in order; see `Compilers.run`."""
    device = str(compilers.device)
    compilers.run([Task(_compile, (*one, device), _room(one[1])) for one in wanted], observe, within)


def _room(problem: Problem) -> int:
    """Bytes of a layer: its weight in 16 bits, in the format it gets, and twice as much on the way there."""
    return 8 * problem.k * problem.n


def _compile(peer: str, problem: Problem, device: str) -> None:
    where = torch.device(device)
    with one_task(where), timed_briefly(briefly_shared), torch.no_grad():
        x = torch.randn((problem.m, problem.k), device=where).bfloat16()
        (call,) = make_calls(peer, problem, x, 1)
        call()
