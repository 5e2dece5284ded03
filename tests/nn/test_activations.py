"""`fuseline.nn.GELU`, `SwiGLU` and `GeGLU` against torch's functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuseline.nn import GELU, GeGLU, SwiGLU


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_torchs_and_takes_a_bias(approximate: str) -> None:
    ours, theirs = GELU(approximate), torch.nn.GELU(approximate)
    x, bias = torch.randn(3, 16), torch.randn(16)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x, bias), theirs(x + bias))


def test_gated_units_take_two_tensors_or_one() -> None:
    x = torch.randn(3, 5, 32)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(SwiGLU()(x), F.silu(gate) * up)
    torch.testing.assert_close(SwiGLU()(gate, up), F.silu(gate) * up)
    torch.testing.assert_close(GeGLU()(x), F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(GeGLU("none")(gate, up), F.gelu(gate) * up)
