"""Bytes and FLOPs of recorded ops."""

from __future__ import annotations

import pytest
import torch

from fuseline.profiling.trace import Inputs
from fuseline.profiling.work import bytes_of_arguments, work_of

BF16, FP32, INT64 = "c10::BFloat16", "float", "long int"


def inputs(*tensors, concrete: tuple[str, ...] = ()) -> Inputs:
    """Tensors as (dims, dtype) or (dims, dtype, strides), then the rest as the profiler writes it."""
    dims = [tuple(t[0]) for t in tensors]
    types = [t[1] for t in tensors]
    strides = [tuple(t[2]) if len(t) > 2 else _strides(t[0]) for t in tensors]
    for text in concrete:
        dims.append(())
        types.append("" if text == "" else "ScalarList" if text.startswith("[") else "Scalar")
        strides.append(())
    return Inputs(tuple(dims), tuple(types), tuple(strides), ("",) * len(tensors) + concrete)


def _strides(dims):
    made, size = [], 1
    for dim in reversed(dims):
        made.append(size)
        size *= dim
    return tuple(made[::-1])


def test_a_product_reads_both_and_writes_one():
    work = work_of("aten::mm", "", inputs(((512, 256), BF16), ((256, 1024), BF16)))
    assert work.bytes == 2 * (512 * 256 + 256 * 1024 + 512 * 1024)
    assert work.flops == 2 * 512 * 256 * 1024
    assert work.dtype == "bf16"


def test_a_cast_reads_one_and_writes_the_other_without_reading_it():
    work = work_of("aten::copy_", "", inputs(((64, 64), BF16), ((64, 64), FP32), concrete=("False",)))
    assert work.bytes == 64 * 64 * (2 + 4)
    assert work.flops == 0


def test_an_addition_in_place_reads_what_it_writes():
    work = work_of("aten::add_", "Tensor", inputs(((100,), FP32), ((100,), FP32), concrete=("1",)))
    assert work.bytes == 3 * 400


def test_an_expanded_gradient_is_read_once():
    work = work_of("aten::mul", "Tensor", inputs(((64, 32), FP32, (0, 0)), ((64, 32), FP32)))
    assert work.bytes == 4 + 2 * 64 * 32 * 4


def test_an_embedding_reads_the_rows_that_are_asked_for():
    given = inputs(((50304, 768), FP32), ((16, 64), INT64), concrete=("-1", "False", "False"))
    out = 16 * 64 * 768 * 4
    assert work_of("aten::embedding", "", given).bytes == 2 * out + 16 * 64 * 8


def test_views_and_allocations_move_nothing():
    assert work_of("aten::transpose", "int", inputs(((8, 8), FP32), concrete=("0", "1"))) is None
    assert work_of("aten::empty_like", "", inputs(((8, 8), FP32), concrete=("", "", "", "", ""))) is None
    assert work_of("autograd::engine::evaluate_function: MmBackward0", "", inputs(((8, 8), FP32))) is None
    assert work_of("aten::mm", "", None) is None


@pytest.mark.parametrize("causal, pairs", [("False", 128 * 128), ("True", 128 * 129 // 2)])
def test_attention_counts_what_causality_leaves(causal: str, pairs: int):
    qkv = ((2, 4, 128, 64), BF16)
    given = inputs(qkv, qkv, qkv, concrete=("0.", causal, "False", ""))
    work = work_of("aten::_scaled_dot_product_flash_attention", "", given)
    assert work.flops == 2 * 2 * 2 * 4 * pairs * 64


def test_the_kernels_op_inside_attention_has_heads_after_time():
    q, k = ((2, 128, 4, 64), BF16), ((2, 256, 2, 64), BF16)
    told = ("", "", "128", "256", "0.", "False", "False")
    # How many arguments follow depends on torch's version.
    (schema, *_) = torch._C._jit_get_schemas_for_operator("aten::_flash_attention_forward")
    given = inputs(q, k, k, concrete=told + ("",) * (len(schema.arguments) - 3 - len(told)))
    assert work_of("aten::_flash_attention_forward", "", given).flops == 4 * 2 * 4 * 128 * 256 * 64


@pytest.mark.parametrize("causal, pairs", [("0", 128 * 128), ("2", 128 * 129 // 2)])
def test_the_backward_of_packed_attention_is_five_products(causal: str, pairs: int, native_ops):
    out, lse, qkv = ((2, 4, 128, 64), BF16), ((2, 4, 128), FP32), ((2, 128, 768), BF16)
    dims = (out[0], (), out[0], lse[0], qkv[0], *((),) * 10)
    types = (BF16, "", BF16, FP32, BF16, "", "", *("Scalar",) * 8)
    told = ("",) * 7 + ("4", "4", causal, "-1", "-1", "0.125", "0.", "0.")
    given = Inputs(dims, types, tuple(_strides(d) for d in dims), told)
    assert work_of("fuseline::attention_packed_backward", "", given).flops == 5 * 2 * 2 * 4 * pairs * 64


def test_adamw_reads_and_writes_all_but_the_gradients():
    lists = Inputs(
        tuple((((8, 4), (16,)),) * 4) + ((), ((), ())) + ((),) * 9,
        ("TensorList",) * 6 + ("Scalar",) * 7 + ("", ""),
        tuple((((4, 1), (1,)),) * 4) + ((), ((), ())) + ((),) * 9,
        ("",) * 6 + ("0.001", "0.9", "0.95", "0.1", "1e-08", "False", "False") + ("", ""),
    )
    elements = 8 * 4 + 16
    assert work_of("aten::_fused_adamw_", "", lists).bytes == pytest.approx(7 * 4 * elements, abs=16)


def test_fuselines_own_ops_are_known(native_ops):
    x, weight = ((64, 768), BF16), ((768,), FP32)
    forward = Inputs(
        ((), x[0], (), (), weight[0], weight[0], (), (), (), (), (), ()),
        ("", BF16, "", "ScalarList", FP32, FP32, "Scalar", "", "Scalar", "", "Scalar", ""),
        ((), (768, 1), (), (), (1,), (1,), (), (), (), (), (), ()),
        ("", "", "", "[768]", "", "", "1e-05", "", "0.", "", "True", ""),
    )
    work = work_of("fuseline::norm_forward", "", forward)
    statistics = 2 * 64 * 4
    assert work.bytes == 2 * 64 * 768 * 2 + 2 * 768 * 4 + statistics
    rows, inner = 64, 3072
    mlp = inputs(
        ((rows, 768), BF16), ((inner, 768), BF16), ((inner,), BF16), ((768, inner), BF16), ((768,), BF16),
        concrete=("",),
    )  # fmt: skip
    assert work_of("fuseline::mlp_forward", "", mlp).flops == 2 * rows * inner * 768 * 2


def test_a_generated_kernel_moves_its_arguments():
    given = inputs(((64, 64), FP32), ((64, 64), BF16), concrete=("4096",))
    assert bytes_of_arguments(given) == 64 * 64 * 6
    assert bytes_of_arguments(None) is None


@pytest.fixture
def native_ops():
    from fuseline import native

    if not native.ready("cpu"):
        pytest.skip(f"the native library is not loaded: {native.status().torch.reason}")
    return torch.ops.fuseline


def test_a_convolution_is_a_product_at_each_place_forward_and_for_each_gradient():
    x, weight, bias = ((8, 64, 56, 56), FP32), ((128, 32, 3, 3), FP32), ((128,), FP32)
    settings = ("[1, 1]", "[2, 2]", "[1, 1]", "2")  # padding, stride, dilation, groups
    each = 2 * 8 * 128 * 28 * 28 * 32 * 9
    assert work_of("aten::mkldnn_convolution", "", inputs(x, weight, bias, concrete=settings)).flops == each
    grad = ((8, 128, 28, 28), FP32)
    rest = ("[128]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2", "[False, True, True]")
    assert work_of("aten::convolution_backward", "", inputs(grad, x, weight, concrete=rest)).flops == each
