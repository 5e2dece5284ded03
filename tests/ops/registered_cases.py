"""Every registered op and every case of it, as parameters of a test."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseline.ops import Op, registered

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
OPS = [pytest.param(op, id=op.name) for op in registered()]
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.label}".replace(" ", "_"))
    for op in registered()
    for case in op.cases
]


def differentiable(op: Op, arguments: dict[str, Any]) -> list[str]:
    """The names of those arguments that have a gradient."""
    given = {name: arguments.get(name) for name in op.differentiable}
    return [n for n, value in given.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
