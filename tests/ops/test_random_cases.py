"""Every registered op over drawn shapes, options, dtypes, layouts and gradients, against float64.

What the contract's cases fix one by one comes together here: rows of any length, contiguous at odd addresses,
between NaN, transposed or stepped; any subset of gradients; incoming gradients laid out as freely, or one
number everywhere, expanded.
A failure's seed is in its name.
"""

from __future__ import annotations

import random

import pytest
import torch

from fuseline.ops import Op, registered
from fuseline.ops.op import outputs

from .drawn_cases import (
    DRAWN,
    DTYPES,
    assert_near,
    drawn_layout,
    incoming,
    largest,
    lay_out,
    log_uniform,
    results,
    to_double,
)
from .registered_cases import differentiable

MOST = {"cpu": 20_000, "cuda": 2_000_000}  # elements
SEEDS = {"cpu": 4, "cuda": 20}

PARAMETERS = [
    pytest.param(
        op, seed, device, id=f"{op.name}-{seed}-{device}", marks=[pytest.mark.gpu] * (device == "cuda")
    )
    for op in registered()
    for device, count in SEEDS.items()
    for seed in range(count)
]


def test_every_op_is_drawn() -> None:
    assert {op.name for op in registered()} == set(DRAWN)


@pytest.mark.parametrize("wrong", [0.0, 2.0, -1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_results_that_are_wrong_are_not_near(wrong: float, dtype: torch.dtype) -> None:
    exact = torch.rand(3, 50_257, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
    plain, ulp = exact.to(dtype), torch.finfo(dtype).eps
    size = largest([exact])
    assert_near(plain, plain, exact, ulp, few=False, what="right", size=size)
    with pytest.raises(AssertionError, match="wrong: error"):
        assert_near(wrong * plain, plain, exact, ulp, few=False, what="wrong", size=size)


@pytest.mark.parametrize("op, seed, device", PARAMETERS)
def test_is_right(op: Op, seed: int, device: str) -> None:
    pick = random.Random(f"{op.name} {seed}")
    dtype = pick.choice(DTYPES)
    case = DRAWN[op.name](pick, log_uniform(pick, MOST[device]))
    arguments = op.inputs(case, torch.device(device), dtype, torch.Generator(device).manual_seed(seed))
    arguments = {
        n: lay_out(v, *drawn_layout(pick)) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()
    }
    before = {n: v.clone() for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    wanted = [name for name in differentiable(op, arguments) if pick.random() < 0.75]
    plain = outputs(op.reference(**arguments))
    whole = all(bool(o.isfinite().all()) for o in plain)
    grads_out = [incoming(o, pick) for o in plain] if whole else []

    found = results(op.function, arguments, wanted, grads_out)
    near = results(op.reference, arguments, wanted, grads_out)
    far = results(op.reference, to_double(arguments), wanted, [g.double() for g in grads_out])
    says = f"{case.shape} {dict(case.options)} {dtype}"
    ulp = torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps
    few = ("norm" in op.name or "entropy" in op.name) and case.shape[-1] < 64
    sizes = [largest(far[: len(plain)])] * len(plain) + [largest(far[len(plain) :])] * (len(far) - len(plain))
    for i, (ours, plainly, exact, size) in enumerate(zip(found, near, far, sizes, strict=True)):
        assert_near(ours, plainly, exact, ulp, few, f"result {i} of {says}", size)
    for name, value in before.items():
        assert torch.equal(arguments[name], value), f"{name} was changed: {says}"
    for ours, again in zip(found, results(op.function, arguments, wanted, grads_out), strict=True):
        torch.testing.assert_close(ours, again, rtol=0, atol=0, equal_nan=True)
