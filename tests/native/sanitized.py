"""Every op's kernels on its own small cases, aligned and not, forward and backward.

Not a test: the program that `test_sanitizer.py` runs under compute-sanitizer. The arguments are names of ops
(default: all).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from fuseline import native
from fuseline.ops import Case, Op, registered
from fuseline.ops.op import outputs

MOST_ELEMENTS = 120_000  # the instrumented kernels are hundreds of times slower


def off_by_one(x: torch.Tensor) -> torch.Tensor:
    """The same elements, one element past where an allocation starts."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return room[1:].view(x.shape).copy_(x)


def run(op: Op, case: Case, dtype: torch.dtype, shifted: bool) -> None:
    inputs: dict[str, Any] = op.inputs(
        case, torch.device("cuda"), dtype, torch.Generator("cuda").manual_seed(0)
    )
    leaves = []
    for name in op.differentiable:
        if isinstance(inputs.get(name), torch.Tensor) and inputs[name].is_floating_point():
            value = off_by_one(inputs[name]) if shifted else inputs[name]
            inputs[name] = value.detach().requires_grad_()
            leaves.append(inputs[name])
    results = [result for result in outputs(op.function(**inputs)) if result.requires_grad]
    if results:
        torch.autograd.grad(
            results, leaves, [torch.randn_like(result) for result in results], allow_unused=True
        )


def main() -> None:
    assert native.ready("cuda"), native.status()
    for op in registered():
        if len(sys.argv) > 1 and op.name not in sys.argv[1:]:
            continue
        for case in op.cases:
            sizes = op.inputs(case, torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0))
            largest = max(v.numel() for v in sizes.values() if isinstance(v, torch.Tensor))
            if largest <= MOST_ELEMENTS:
                for dtype in op.dtypes:
                    for shifted in (False, True):
                        run(op, case, dtype, shifted)
        torch.cuda.synchronize()
        print(f"{op.name} ran", flush=True)


if __name__ == "__main__":
    main()
