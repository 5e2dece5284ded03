"""The norms' backward from the 16-bit result of a norm without weight and bias."""

from __future__ import annotations

import pytest
import torch

from fuseline import native

from .norm_checks import check_gradients

pytestmark = pytest.mark.gpu

KINDS = [
    "layer_norm",
    "rms_norm",
    "add_layer_norm",
    "add_rms_norm",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
]
SHAPES = [
    (1, 768),
    (70, 768),
    (4099, 768),
    (333, 384),
    (2051, 1600),
    (65, 4096),
    (19, 16384),
    (5, 140000),
    (40, 8),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, n", SHAPES)
def test_gradients(rows: int, n: int, kind: str, dtype: torch.dtype) -> None:
    native.load()
    torch.manual_seed(n)
    for options in (
        {"weighted": False},
        {"weighted": False, "offset": 1},
        {"affine": torch.float32},
        {"p": 0.0},
    ):
        check_gradients(kind, rows, n, dtype, wide=torch.float32, normalized=True, **options)
    check_gradients(kind, rows, n, dtype, wide=torch.float32, normalized=True, weighted=False, each=False)


@pytest.mark.parametrize("kind", ["layer_norm", "add_rms_norm"])
def test_rows_of_odd_length(kind: str) -> None:
    native.load()
    torch.manual_seed(0)
    for rows, n in ((31, 31), (3, 1001), (2, 50257)):
        check_gradients(kind, rows, n, torch.bfloat16, wide=torch.float32, normalized=True, weighted=False)


def test_float32_results_are_refused() -> None:
    native.load()
    x, mean = torch.randn(4, 8, device="cuda"), torch.zeros(4, device="cuda")
    given = x, None, x, (8,), mean, mean, None, None, None, 0.0, None, [True, False, False, False, False]
    with pytest.raises(TypeError, match="Half or BFloat16"):
        torch.ops.fuseline.norm_backward("layer_norm", *given, True)
