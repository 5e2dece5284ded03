"""Plans of a step of AdamW over all parameters, and of the norm of all gradients."""

from __future__ import annotations

import torch

from fuseline.errors import InputError
from fuseline.ops.op import DTYPES
from fuseline.ops.plans.plan import Plan, launches
from fuseline.ops.plans.problem import Rows


def adamw(parameter: Rows, tensors: int = 1) -> tuple[Plan, ...]:
    """Of `tensors` parameters of one shape and dtype."""
    counts = _counts(parameter, tensors)
    return launches("step", *torch.ops.fuseline.plan_adamw(counts, DTYPES.index(parameter.dtype)))


def gradient_norm(gradient: Rows, tensors: int = 1) -> tuple[Plan, ...]:
    """Of `tensors` gradients of one shape and dtype."""
    counts, dtypes = _counts(gradient, tensors), [DTYPES.index(gradient.dtype)] * tensors
    return launches("norm", *torch.ops.fuseline.plan_gradient_norm(gradient.gpu.numbers(), counts, dtypes))


def _counts(each: Rows, tensors: int) -> list[int]:
    if tensors < 1:
        raise InputError(f"tensors is {tensors}; a model has one parameter or more.")
    return [each.count * each.length] * tensors
