"""What an op is credited with having moved, against the tensors themselves."""

from __future__ import annotations

import pytest
import torch

from fuseline.bench.ops.bound import bind_inputs
from fuseline.bench.ops.plan import DTYPES, MIXED, Place
from fuseline.native.kernels import NORMS
from fuseline.ops import get
from fuseline.ops.op import outputs


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_credited_with_its_tensors_once(name: str, dtype: str) -> None:
    op, mixed = get(name), dtype == MIXED
    place = Place(op, DTYPES[dtype], 6, 40, mixed=mixed)
    bound = bind_inputs(op, place.case, place.dtype, torch.device("cpu"), 0)
    given = {k: v for k, v in bound.inputs.items() if isinstance(v, torch.Tensor) and k != "seed"}
    made = outputs(op.reference(**bound.inputs))
    assert bound.bytes_moved("fw") == nbytes(*given.values(), *made)  # and with no statistics

    normed = made[1] if "residual" in given else given["x"]
    read = [*bound.grads_out, normed, given["weight"]]
    written = [given[leaf] for leaf in op.differentiable]
    if "residual" in given and "p" not in bound.inputs and not mixed:
        written.remove(given["x"])  # one tensor is the gradient of both
    statistics = 6 * 4 * (2 if "layer_norm" in name else 1)
    assert bound.bytes_moved("bw") == nbytes(*read, *written) + statistics
