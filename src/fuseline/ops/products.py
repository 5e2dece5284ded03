"""Which of cuBLASLt's algorithms a product of matrices gets: measured once on a GPU, and kept on disk.

    with products.measured(device):
        step(batch)              # what this computes is measured when it ends
    products.choices(device)     # problem -> (algorithm, microseconds, those of torch's own)

`fuseline.ops.linear` and `fuseline.ops.mlp` take the choices, forward and backward; recorded steps measure
what they compute before they are recorded. Torch's own product is among the candidates; an algorithm takes
its place only where it computes the same product, and faster by 3%.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline import native
from fuseline.native.progress import say
from fuseline.timing import time_calls

PROPOSALS = 8
REPEATS = 7
HEAD_START = 1e-3  # seconds: all candidates rest equally long
LEAST_GAIN = 1.03
"""Torch's own time over that of an algorithm which takes its place. In a recorded step of GPT-2, gains of 2%
of a product alone did not show: the step took 1.005 times as long (docs/experiments/training_step.md)."""
SECONDS = 2.0
"""How long new problems are measured at one time; those that are left are torch's own until the next time."""
LEAST_FLOPS = 1e9  # of a problem that is measured: smaller ones end within two microseconds
OWN = -1
"""The number of torch's own product among algorithms."""


@dataclass(frozen=True)
class Product:
    """A problem: op(left) op(right) + bias, [m, n] over k; a turned operand is given transposed. `wide`: the
    result is float32, where the operands are of 16 bits."""

    dtype: int
    turned_left: bool
    turned_right: bool
    bias: bool
    m: int
    n: int
    k: int
    wide: bool = False

    FLOAT16 = 2  # the library's number; bfloat16 has 14

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float16 if self.dtype == self.FLOAT16 else torch.bfloat16

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def numbers(self) -> list[int]:
        return [
            self.dtype,
            *map(int, (self.turned_left, self.turned_right, self.bias)),
            self.m,
            self.n,
            self.k,
            int(self.wide),
        ]

    def name(self) -> str:
        return " ".join(map(str, self.numbers()))

    @classmethod
    def of(cls, numbers: list[int]) -> Product:
        dtype, turned_left, turned_right, bias, m, n, k, wide = numbers
        return cls(dtype, bool(turned_left), bool(turned_right), bool(bias), m, n, k, bool(wide))


@dataclass(frozen=True)
class Choice:
    """An algorithm's number (`OWN`: torch's product) and its time, with that of torch's product."""

    algorithm: int
    time_us: float
    torch_us: float


def choices(device: torch.device) -> Mapping[Product, Choice]:
    """What was measured on this GPU, with this cuBLASLt."""
    return dict(_kept(_file(device)))


@contextlib.contextmanager
def measured(device: torch.device, *, seconds: float = SECONDS) -> Iterator[None]:
    """Measures, behind the block, the products computed in it that were not measured before, for so many
    seconds at most; it says so on stderr.

    It does nothing on a CPU, where the native library is not loaded, while a CUDA graph is captured, and
    under `torch.use_deterministic_algorithms`, where torch's own products are taken.
    """
    if device.type != "cuda" or not native.ready("cuda") or torch.are_deterministic_algorithms_enabled():
        yield
        return
    if torch.cuda.is_current_stream_capturing():
        yield
        return
    file, index = _file(device), torch.cuda.current_device() if device.index is None else device.index

    def choose(problem: Product, choice: Choice) -> None:
        torch.ops.fuseline.product_choose(index, problem.numbers(), choice.algorithm)

    known = _kept(file)
    for problem, choice in known.items():
        choose(problem, choice)
    yield
    numbers = torch.ops.fuseline.product_new_problems(index)
    width = len(Product.__dataclass_fields__)
    computed = (Product.of(numbers[start : start + width]) for start in range(0, len(numbers), width))
    new = measure_within(
        seconds, computed, lambda problem: measure(problem, device), choose, clock=time.perf_counter
    )
    if new:
        _write(file, {**_kept(file), **new})  # another process may have written meanwhile


def measure_within(
    seconds: float,
    problems: Iterable[Product],
    measure: Callable[[Product], Choice],
    choose: Callable[[Product, Choice], None],
    *,
    clock: Callable[[], float],
) -> dict[Product, Choice]:
    """Measures and chooses for problems, the largest first, until so many seconds have passed on `clock`."""
    wanted = sorted((p for p in problems if p.flops >= LEAST_FLOPS), key=lambda p: p.flops, reverse=True)
    if not wanted:
        return {}
    begin = clock()
    new: dict[Product, Choice] = {}
    for problem in wanted:
        if clock() - begin >= seconds:
            break
        try:
            new[problem] = measure(problem)
        except torch.OutOfMemoryError:
            continue  # there is no room beside what runs: torch's own product stays, and is not kept
        choose(problem, new[problem])
    faster = sum(choice.algorithm != OWN for choice in new.values())
    say(
        f"measured {len(new)} of {len(wanted)} new matrix products in {clock() - begin:.1f} s; for {faster} "
        "another algorithm than torch's is faster"
    )
    return new


def measure(problem: Product, device: torch.device) -> Choice:
    """The fastest of torch's own product and the algorithms that cuBLASLt proposes, on random matrices."""
    m, n, k = problem.m, problem.n, problem.k
    draw = functools.partial(torch.randn, device=device, dtype=problem.torch_dtype)
    left = draw(*((k, m) if problem.turned_left else (m, k)))
    right = draw(*((n, k) if problem.turned_right else (k, n)))
    bias = draw(n) if problem.bias else None
    by_algorithm = functools.partial(
        torch.ops.fuseline.product_by_algorithm.default,
        *(left, problem.turned_left, right, problem.turned_right, bias),
        wide=problem.wide,
    )
    a = left.t() if problem.turned_left else left
    b = right.t() if problem.turned_right else right
    own = functools.partial(torch.mm, a, b) if bias is None else functools.partial(torch.addmm, bias, a, b)
    if problem.wide:
        own = functools.partial(torch.mm, a, b, out_dtype=torch.float32)
    calls = {OWN: own}
    wanted = own()
    for algorithm in range(PROPOSALS):
        found = by_algorithm(algorithm)
        if found.numel() == 0:
            break
        if _is_same(found, wanted):
            calls[algorithm] = functools.partial(by_algorithm, algorithm)
    del found, wanted
    times = dict.fromkeys(calls, float("inf"))
    for order in (calls, reversed(calls)):  # the better of two, so that one that stumbled is asked again
        for number in order:
            found = time_calls(calls[number], device, repeats=REPEATS, head_start=HEAD_START).median
            times[number] = min(times[number], found)
    best = chosen(times)
    return Choice(best, times[best], times[OWN])


def chosen(times: Mapping[int, float]) -> int:
    """The fastest algorithm; torch's own where none gains `LEAST_GAIN` over it."""
    best = min(times, key=lambda number: times[number])
    return best if times[OWN] >= times[best] * LEAST_GAIN else OWN


def _is_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two products differ by no more than rounding to their dtype. In float32 sums over 16,384 rows
    differ by 2e-5 from one order to another, and by 1e-3 where parts are rounded to 16 bits on the way."""
    difference = torch.linalg.vector_norm((found - wanted).float()) / torch.linalg.vector_norm(wanted.float())
    return bool(difference <= (1e-4 if wanted.dtype is torch.float32 else 2 * torch.finfo(wanted.dtype).eps))


def _file(device: torch.device) -> Path:
    gpu = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    version = torch.ops.fuseline.product_library_version()
    return native.cache_dir() / "products" / f"{gpu}-cublaslt-{version}.json"


def _kept(file: Path) -> dict[Product, Choice]:
    """What the file holds; nothing where there is none, or where it is not ours."""
    try:
        told = json.loads(file.read_text())
        return {
            Product.of(list(map(int, name.split()))): Choice(int(a), float(t), float(own))
            for name, (a, t, own) in told.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(file: Path, choices: Mapping[Product, Choice]) -> None:
    """Put the file in place whole. A folder that cannot be written costs the next process a measurement."""
    told = {p.name(): [c.algorithm, round(c.time_us, 2), round(c.torch_us, 2)] for p, c in choices.items()}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        with os.fdopen(descriptor, "w") as opened:
            json.dump(told, opened, indent=0)
        os.replace(name, file)
