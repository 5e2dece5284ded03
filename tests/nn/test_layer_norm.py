"""`fuseline.nn.LayerNorm` in the place of torch's."""

from __future__ import annotations

import pytest
import torch

from fuseline.nn import LayerNorm


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 0.1}])
def test_takes_the_place_of_torchs(options: dict[str, object]) -> None:
    theirs = torch.nn.LayerNorm((4, 6), **options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = LayerNorm((4, 6), **options)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    x = torch.randn(3, 4, 6)
    torch.testing.assert_close(ours(x), theirs(x))


def test_keeps_its_inputs_dtype_under_autocast() -> None:
    norm = LayerNorm(16)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(
        y.float(), torch.nn.functional.layer_norm(x.float(), (16,)), rtol=2e-2, atol=2e-2
    )
