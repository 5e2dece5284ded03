"""Every op's kernels on its own small cases, aligned and not, forward and backward.

Not a test: the program that `test_sanitizer.py` runs under compute-sanitizer. The arguments are names of ops
(default: all); --cases also prints each case before it runs, --racecheck leaves out what racecheck cannot
run. An op that raises says in which case, and the others run all the same.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from fuseline import native
from fuseline.ops import Case, Op, registered
from fuseline.ops.op import outputs

MOST_ELEMENTS = 120_000  # the instrumented kernels are hundreds of times slower

# The 16-bit kernels of cuBLAS make racecheck itself fail, with a hardware exception. What is ours around a
# loss's products belongs to other ops, and runs there in every dtype; a quantized layer's gradient is such a
# product.
RACECHECKED_DTYPES = {"linear_cross_entropy": (torch.float32,)}
RACECHECKED_FORWARD = ("quant_linear",)

# What the ops' own cases of that size do not reach: rows that wait in shared memory, alone and in clusters,
# aligned and not; tiles of short rows at odd addresses; those of the norms' general kernels; losses in
# passing; weights of 4 and 8 bits whose columns a cluster shares.
SUM = {"reduction": "sum", "ignored": 0.0}
MASKED = {"p": 0.1, "x_bias": True}
INT4 = {"format": "int4", "group_size": 128}


def long_rows(**options: Any) -> tuple[Case, ...]:
    """Rows that clusters share, at odd addresses those of the general kernels."""
    return (
        Case("many long rows at odd addresses", (150, 16391), options),
        Case("few of the longest rows", (3, 65544), options),
        Case("few of the longest rows at odd addresses", (2, 65539), options),
    )


def odd_rows(**options: Any) -> tuple[Case, ...]:
    """Many rows at odd addresses: of a warp, of a block."""
    return (
        Case("rows of 67, of a warp", (600, 67), options),
        Case("rows of 257, of a warp", (600, 257), options),
        Case("rows of 2,049, of a block", (530, 2049), options),
    )


BEYOND: dict[str, tuple[Case, ...]] = {
    "layer_norm": (
        *long_rows(),
        Case("many rows of 31", (600, 31)),
        Case("few rows of 31", (300, 31)),
        *odd_rows(),
        Case("many long rows at odd addresses", (1061, 8193)),
        Case("rows of a block", (9, 4096)),
        Case("rows of a cluster", (3, 20000)),
        Case("rows that wait in clusters", (2, 70000)),
    ),
    "rms_norm": (*long_rows(), *odd_rows(), Case("many rows of two blocks", (150, 28680))),
    "dropout_add_layer_norm": (
        *long_rows(**MASKED),
        Case("many rows of two blocks", (264, 16384), MASKED),
        Case("rows that no ring has room for", (40, 131080), MASKED),
        Case("many long rows at odd addresses", (1061, 8193), MASKED),
    ),
    "dropout_add_rms_norm": (*long_rows(**MASKED), *odd_rows(**MASKED)),
    "add_rms_norm": (*long_rows(), Case("many rows of two blocks", (264, 16384))),
    "add_layer_norm": (
        *long_rows(),
        Case("many rows of two blocks", (264, 16384)),
        Case("many rows of 31", (600, 31)),
        Case("few rows of 31", (300, 31)),
        Case("rows of a cluster", (3, 20000)),
        Case("rows that wait in odd clusters", (2, 20001)),
    ),
    "softmax": (
        Case("rows that wait", (3, 20000)),
        Case("rows that wait in odd clusters", (2, 70001)),
        Case("a row that waits in eight blocks", (1, 140000)),
        Case("rows that wait at odd addresses", (9, 1025)),
        Case("tiles of rows of 31", (21, 31)),
        Case("tiles of rows of 1023", (9, 1023)),
    ),
    "quant_linear": (
        Case("int8, a cluster shares columns", (72, 1024), {"n": 136}),
        Case("int4, a block has all columns", (130, 256), {**INT4, "n": 136, "bias": True}),
        Case("int4, a cluster shares columns", (100, 1096), {**INT4, "n": 131}),
        Case("int4, three warpgroups", (256, 264), {**INT4, "n": 8520}),
    ),
    "embedding": (
        Case("bins, most of one row", (9, 600, 8), {"vocabulary": 3000, "alike": 0.8, "padding_idx": 7}),
    ),
    "cross_entropy": (
        Case("rows that wait", (3, 20000), {**SUM, "grad_in_forward": True}),
        Case("rows that wait in odd clusters", (2, 70001), {**SUM, "grad_in_forward": True}),
        Case(
            "a row that waits, capped and smoothed",
            (1, 40000),
            {**SUM, "soft_cap": 5.0, "label_smoothing": 0.1},
        ),
        Case("rows that pass", (270, 1100), SUM),
    ),
}


def off_by_one(x: torch.Tensor) -> torch.Tensor:
    """The same elements, one element past where an allocation starts."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return room[1:].view(x.shape).copy_(x)


def run(op: Op, case: Case, dtype: torch.dtype, *, shifted: bool, backward: bool) -> None:
    inputs: dict[str, Any] = op.inputs(
        case, torch.device("cuda"), dtype, torch.Generator("cuda").manual_seed(0)
    )
    leaves = []
    for name in op.differentiable:
        if isinstance(inputs.get(name), torch.Tensor) and inputs[name].is_floating_point():
            value = off_by_one(inputs[name]) if shifted else inputs[name]
            inputs[name] = value.detach().requires_grad_()
            leaves.append(inputs[name])
    with torch.set_grad_enabled(backward):
        results = [result for result in outputs(op.function(**inputs)) if result.requires_grad]
    if results:
        torch.autograd.grad(
            results, leaves, [torch.randn_like(result) for result in results], allow_unused=True
        )


def cases(op: Op) -> Iterator[Case]:
    for case in op.cases:
        sizes = op.inputs(case, torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0))
        if max(v.numel() for v in sizes.values() if isinstance(v, torch.Tensor)) <= MOST_ELEMENTS:
            yield case
    yield from BEYOND.get(op.name, ())


def run_cases(op: Op, *, announce: bool, racecheck: bool) -> None:
    """Raises what a case raises, with a note of which it is."""
    dtypes = RACECHECKED_DTYPES.get(op.name, op.dtypes) if racecheck else op.dtypes
    backward = not (racecheck and op.name in RACECHECKED_FORWARD)
    for case in cases(op):
        for dtype in dtypes:
            for shifted in (False, True):
                what = f"{op.name}, {case.label}, {dtype}{', shifted' if shifted else ''}"
                if announce:
                    print(what, flush=True)
                try:
                    run(op, case, dtype, shifted=shifted, backward=backward)
                    torch.cuda.synchronize()  # so that an error comes with its case
                except Exception as error:
                    error.add_note(f"in {what}")
                    raise


def main() -> None:
    assert native.ready("cuda"), native.status()
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    failed = []
    for op in registered():
        if names and op.name not in names:
            continue
        try:
            run_cases(op, announce="--cases" in sys.argv, racecheck="--racecheck" in sys.argv)
            print(f"{op.name} ran", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(op.name)
    if failed:
        sys.exit(f"raised: {' '.join(failed)}")


if __name__ == "__main__":
    main()
