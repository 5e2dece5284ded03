"""Plans: which kernel takes a problem on made-up and real GPUs, without one here."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from fuseline import native, ops
from fuseline.errors import InputError
from fuseline.ops.plans import GPUS, NORMS, Plan, explain

pytestmark = pytest.mark.skipif(not native.ready("cpu"), reason="the native core, which decides, is missing")


def both(
    shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, gpu: str = "h200", **options
) -> list[str]:
    return [plan.kernel for plan in explain("softmax", shape, dtype, gpu=gpu, **options).plans]


@pytest.mark.parametrize(
    "shape, gpu, forward, backward",
    [
        ((64, 1024), "h200", "softmax_forward_few", "softmax_backward_few"),
        ((131072, 4096), "h200", "softmax_forward_packed", "softmax_backward_rows"),
        ((100000, 197), "h200", "softmax_forward_tiled", "softmax_backward_tiled"),
        ((100000, 197), "a100", "softmax_forward_rows", "softmax_backward_rows"),
        ((50000, 1000), "h200", "softmax_forward_tiled_vectors", "softmax_backward_tiled_vectors"),
        ((8192, 50257), "h200", "softmax_forward_waiting", "softmax_backward_waiting"),
        ((8192, 50257), "a100", "softmax_forward_streamed", "softmax_backward_streamed"),
    ],
)
def test_known_problems_get_the_kernels_that_they_are_known_for(shape, gpu, forward, backward) -> None:
    assert both(shape, gpu=gpu) == [forward, backward]


def test_what_the_op_is_asked_for_decides_with_the_shape() -> None:
    assert both((4, 12, 128, 128), causal=True)[0] == "softmax_masked_rows"
    assert both((4, 12, 128, 128), masked=True)[0] == "softmax_masked_rows"
    assert both((4, 12, 127, 127), masked=True)[0] == "softmax_forward_rows", "its mask is not aligned"
    assert both((131072, 4096), scale=-1.0)[0] == "softmax_forward_rows", "packed rows need a positive scale"
    assert both((131072, 4096), torch.float32)[0] == "softmax_forward_rows", "packed rows have 16 bits"
    assert both((131072, 4096), address=2) != both((131072, 4096))


@pytest.mark.parametrize(
    "shape, options, with_gradient, alone",
    [
        ((8192, 1000), {}, "cross_entropy_short", "cross_entropy_short"),
        ((8192, 1000), {"label_smoothing": 0.1}, "cross_entropy_rows", "cross_entropy_rows"),
        ((8192, 50257), {}, "cross_entropy_waiting", "cross_entropy_passing"),
        ((8192, 50257), {"weight": True}, "cross_entropy_waiting", "cross_entropy_waiting"),
        ((100, 50257), {}, "cross_entropy_waiting", "cross_entropy_waiting"),
        ((8, 2000000), {"soft_cap": 30.0}, "cross_entropy_streamed", "cross_entropy_streamed"),
    ],
)
def test_cross_entropy_goes_by_what_is_wanted_of_a_row(shape, options, with_gradient, alone) -> None:
    plans = explain("cross_entropy", shape, gpu="h200", **options).plans
    assert [plan.kernel for plan in plans] == [with_gradient, alone]


def test_gelu_goes_by_its_bias_and_how_many_rows_sum_into_its_gradient() -> None:
    (forward, backward) = explain("gelu", (16384, 3072), gpu="h200").plans
    assert (forward.kernel, backward.kernel) == ("elementwise", "elementwise")
    assert forward.elements_per_access == 4, "8 bytes"
    assert explain("gelu", (16384, 3072), gpu="h200", address=2).plans[0].elements_per_access == 1
    (_, many) = explain("gelu", (16384, 3072), gpu="h200", bias=True).plans
    (_, few) = explain("gelu", (64, 3072), gpu="h200", bias=True).plans
    assert (many.kernel, few.kernel) == ("gelu_bias_gradients", "gelu_bias_gradients_few")
    assert few.workspace_bytes == 0
    assert many.workspace_bytes % (3072 * 4) == 0, "fp32 sums of whole rows"
    assert f"{many.workspace_bytes:,} bytes of workspace" in str(many)


def test_gated_units_take_rows_with_gaps_whole_where_they_keep_to_8_bytes() -> None:
    def wide(shape, **options) -> list[int]:
        return [plan.elements_per_access for plan in explain("swiglu", shape, gpu="h200", **options).plans]

    assert wide((4096, 11008)) == [4, 4]
    assert wide((4096, 22016), halves=True) == [4, 4]
    assert wide((4096, 22018), halves=True) == [1, 1], "the half rows have 11,009 elements"
    assert wide((4096, 11009)) == [4, 4], "without gaps all rows are one"
    with pytest.raises(InputError, match="it has to be even"):
        explain("geglu", (4, 3), gpu="h200", halves=True)


@pytest.mark.parametrize(
    "rows, k, n, options, kernel",
    [
        (1, 4096, 12288, {"format": "plain"}, "gemv_kernel"),
        (1, 11008, 4096, {"format": "plain"}, "gemv_team_kernel"),
        (1, 1024, 1024, {}, "gemv_quantized_kernel"),
        (1, 4096, 22016, {}, "linear_stream_kernel"),
        (16, 4096, 12288, {}, "linear_slices_kernel"),
        (30, 4096, 4096, {}, "linear_tiles_kernel"),
        (30, 4096, 4096, {"format": "int4", "zero_points": True}, "linear_tiles_kernel"),
        (100, 4096, 4096, {"format": "int4", "zero_points": True}, "linear_stream_kernel"),
        (256, 4096, 4096, {}, "linear_65_to_256_kernel"),
        (512, 4096, 4096, {}, "linear_tiles_kernel"),
        (600, 4096, 4096, {}, ""),
        (16, 4096, 4096, {"format": "plain"}, ""),
        (1, 4097, 4096, {"format": "plain"}, ""),
    ],
)
def test_linears_go_by_rows_weights_and_format(rows, k, n, options, kernel) -> None:
    (plan,) = explain("quant_linear", (rows, k), gpu="h200", out_features=n, **options).plans
    assert plan.kernel == kernel
    assert plan.reason


def test_linears_of_other_gpus_and_dtypes_go_by_streams_or_by_torch() -> None:
    def kernel(rows: int, dtype: torch.dtype = torch.bfloat16, gpu: str = "h200") -> str:
        return explain("quant_linear", (rows, 4096), dtype, gpu=gpu, out_features=4096).plans[0].kernel

    assert (
        kernel(30, gpu="a100")
        == kernel(30, torch.float16)
        == kernel(30, gpu="b200")
        == "linear_stream_kernel"
    )
    assert kernel(200, gpu="a100") == kernel(200, torch.float16) == kernel(1, torch.float32) == ""
    told = str(explain("quant_linear", (30, 4096), gpu="h200", out_features=4096))
    assert "blocks of 384 threads in clusters of" in told
    assert "16 elements an access" in told
    with pytest.raises(InputError, match="a weight has one row or more"):
        explain("quant_linear", (4, 64), gpu="h200", out_features=0)


def test_the_loss_of_fp16_has_general_kernels_alone() -> None:
    for shape, kernel in (((8192, 1000), "rows"), ((8192, 50257), "waiting")):
        plans = explain("cross_entropy", shape, torch.float16, gpu="h200").plans
        assert [plan.kernel for plan in plans] == [f"cross_entropy_{kernel}"] * 2


def test_fp16_has_one_kernel_where_bf16_has_two() -> None:
    def plans(op: str, shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> tuple[Plan, ...]:
        return explain(op, shape, dtype, gpu="h200", **options).plans

    def kernels(op: str, shape: tuple[int, ...], **options: Any) -> list[list[str]]:
        dtypes = torch.bfloat16, torch.float16
        return [[plan.kernel for plan in plans(op, shape, dtype, **options)] for dtype in dtypes]

    few, one = kernels("gelu", (64, 3072), bias=True)
    assert few == ["elementwise", "gelu_bias_gradients_few"]
    assert one == ["elementwise", "gelu_bias_gradients"]
    waits, twice = kernels("layer_norm", (8192, 50257))
    assert (waits[0], twice[0]) == ("norm_forward_waiting", "norm_forward_streamed")
    of_few, of_many = (
        plans("embedding", (1024, 8192), dtype)[0] for dtype in (torch.bfloat16, torch.float16)
    )
    assert of_few.blocks > of_many.blocks, "rows of a thread: two, four"


def test_softmax_of_fp16_has_general_kernels_alone() -> None:
    for shape in ((64, 1024), (100000, 197), (50000, 1000), (131072, 4096)):
        kernels = both(shape, torch.float16)
        assert kernels == ["softmax_forward_rows", "softmax_backward_rows"], shape
    assert both((8192, 50257), torch.float16) == ["softmax_forward_waiting", "softmax_backward_waiting"]


@pytest.mark.parametrize(
    "op, shape, options, forward, backward",
    [
        ("layer_norm", (65536, 768), {}, "norm_forward_held", "norm_backward_ring"),
        ("layer_norm", (65536, 8192), {}, "norm_forward_packed", "norm_backward_ring"),
        ("rms_norm", (128, 4096), {}, "norm_forward_few", "norm_backward_apart"),
        ("rms_norm", (16, 16384), {}, "norm_forward_held", "norm_backward_few"),
        ("add_layer_norm", (65536, 768), {"fp32_stream": True}, "norm_forward_added", "norm_backward_ring"),
        ("add_rms_norm", (65536, 128), {}, "norm_forward_held", "norm_backward_tiled"),
        ("dropout_add_layer_norm", (4096, 65536), {}, "norm_forward_fetched", "norm_backward_ring"),
        ("layer_norm", (4096, 50257), {}, "norm_forward_waiting", "norm_backward_general"),
        ("layer_norm", (1, 3000000), {"gpu": "a100"}, "norm_forward_streamed", "norm_backward_general"),
    ],
)
def test_norms_go_by_width_rows_and_what_is_added(op, shape, options, forward, backward) -> None:
    plans = explain(op, shape, **{"gpu": "h200", **options}).plans
    assert [plan.kernel for plan in plans] == [forward, backward]
    for plan in plans:
        (alone,) = explain(op, shape, **{"gpu": "h200", **options}, direction=plan.work).plans
        assert alone == plan


def test_only_sums_over_rows_of_several_blocks_need_a_workspace() -> None:
    (forward, many) = explain("layer_norm", (65536, 768), gpu="h200").plans
    assert forward.workspace_bytes == 0
    assert many.workspace_bytes == 2 * 132 * 768 * 4, "weight's and bias's, of each block"
    assert explain("layer_norm", (64, 768), gpu="h200").plans[1].workspace_bytes == 0


def attention_kernels(shape: tuple[int, ...], gpu: str = "h200", **options: Any) -> list[list[str]]:
    plans = explain("attention", shape, **{"gpu": gpu, **options}).plans
    return [[plan.kernel for plan in plans if plan.work == work] for work in ("forward", "backward")]


SUMS = ["attention_delta", "attention_backward_keys_panels", "attention_backward_rows_panels"]
BY_WARPS = ["attention_delta", "attention_backward_keys", "attention_backward_rows"]
SINGLE = ["attention_delta", "attention_backward_single"]
SHORT = [["short_forward_warpgroups"], ["short_backward_warpgroups"]]
SUM_GROUPS = [SHORT[0], [*SHORT[1], "sum_groups", "sum_groups"]]
PANELS = ["attention_forward_panels"]


@pytest.mark.parametrize(
    "shape, options, kernels",
    [
        ((64, 12, 128, 64), {}, SHORT),
        ((64, 12, 128, 64), {"kv_heads": 4}, SUM_GROUPS),
        ((64, 12, 64, 64), {}, [["short_forward"], ["short_backward"]]),
        ((64, 12, 128, 64), {"gpu": "a100"}, [["short_forward"], ["short_backward"]]),
        ((64, 12, 128, 64), {"sequences": True}, [PANELS, SHORT[1]]),
        ((64, 12, 128, 128), {"sequences": True}, SHORT),
        ((8, 12, 1024, 64), {}, [PANELS, SINGLE]),
        ((8, 12, 1024, 64), {"dropout": 0.1}, [PANELS, SINGLE]),
        ((8, 12, 4096, 64), {"dropout": 0.1}, [PANELS, SUMS]),
        ((8, 12, 1024, 64), {"window": 100}, [PANELS, SUMS]),
        ((8, 12, 1024, 64), {"masked": True}, [PANELS, SUMS]),
        ((8, 12, 1024, 64), {"bias": True}, [PANELS, [*SUMS, "sum_left"]]),
        ((8, 12, 1024, 64), {"gpu": "b200"}, [["attention_forward"], BY_WARPS]),
        ((8, 12, 1024, 32), {"causal": True}, [["attention_forward"], BY_WARPS]),
        ((8, 12, 1024, 128), {}, [PANELS, SUMS]),
        ((8, 12, 1024, 256), {}, [["attention_forward"], [*BY_WARPS[:2], *BY_WARPS[1:]]]),
        ((4, 32, 1, 128), {"keys": 8192}, [["attention_split", "attention_combine_few"], SUMS]),
        ((1, 4, 1, 128), {"keys": 8192}, [["attention_split", "attention_combine"], SUMS]),
        ((400, 32, 1, 128), {"keys": 8192}, [["attention_split"], SUMS]),
    ],
)
def test_attention_goes_by_length_heads_and_what_is_asked(shape, options, kernels) -> None:
    assert attention_kernels(shape, **options) == kernels


def test_attention_in_other_dtypes_and_of_what_no_kernel_takes() -> None:
    fp32 = explain("attention", (8, 12, 100, 64), torch.float32, gpu="h200", bias=True).plans
    assert [plan.kernel for plan in fp32][:4] == ["attention_forward", *BY_WARPS]
    assert [plan.kernel for plan in fp32][4:] == ["attention_grad_mask", "sum_pieces"]
    fp16 = explain("attention", (8, 12, 100, 64), torch.float16, gpu="h200").plans
    assert fp16[0].kernel == PANELS[0], "Hopper has no short kernels of fp16"
    assert (
        explain("attention", (8, 12, 100, 64), torch.float16, gpu="a100").plans[0].kernel == "short_forward"
    )
    for shape in ((1, 1, 64, 65), (1, 1, 64, 264)):
        assert attention_kernels(shape) == [[""], [""]]
    wide = explain("attention", (2, 12, 1024, 64), torch.float32, gpu="l40s", bias=True).plans
    assert {plan.reason for plan in wide} == {"the tiles need more shared memory than the GPU has"}


def test_attentions_workspace_is_of_what_is_launched() -> None:
    forward, delta, single = explain("attention", (8, 12, 1024, 64), gpu="h200").plans
    statistics = 2 * 8 * 12 * 1024 * 4
    assert forward.workspace_bytes == single.workspace_bytes == 0, "the first launch names the whole"
    assert delta.workspace_bytes == statistics + 8 * 12 * 1024 * 64 * 4 + 2 * 8 * 12 * 16 * 4
    (few, many) = (explain("attention", (B, 12, 128, 64), gpu="h200").plans[0] for B in (8, 512))
    assert (few.workspace_bytes, many.workspace_bytes) == (0, 16), "a counter of problems, for many"
    assert "6,144 blocks of 256 threads" in str(many)


@pytest.mark.parametrize(
    "shape, options, blocks, cluster",
    [
        ((1, 32, 128), {"keys": 500}, 256, 8),
        ((8, 32, 128), {"kv_heads": 8}, 320, 1),
        ((64, 32, 128), {}, 2048, 1),
        ((1, 32, 128), {"keys": 500, "gpu": "a100"}, 224, 1),
    ],
)
def test_a_decoding_step_spreads_a_context_over_blocks(shape, options, blocks, cluster) -> None:
    (plan,) = explain("decode_attention", shape, **{"gpu": "h200", **options}).plans
    assert (plan.kernel, plan.blocks, plan.blocks_per_row) == ("decode_attention", blocks, cluster)
    assert (plan.workspace_bytes > 0) == (blocks > shape[0] * shape[1] and cluster == 1)
    assert explain("decode_attention", (1, 32, 96), gpu="h200").plans[0].kernel == ""


ONE = ["small_layer_forward"]
TWO = ["small_layer_heads", "small_layer_out"]
LAYER_BACKWARD = ["small_layer_heads_backward", "small_layer_remaining"]


@pytest.mark.parametrize(
    "shape, options, forward, backward",
    [
        ((8, 10, 64), {"heads": 4}, ONE, LAYER_BACKWARD),
        ((8, 16, 512), {}, ONE, LAYER_BACKWARD),
        ((8, 16, 512), {"captured": True}, TWO, LAYER_BACKWARD),
        ((8, 16, 512), {"dtype": torch.float32}, TWO, LAYER_BACKWARD),
        ((8, 128, 512), {}, TWO, LAYER_BACKWARD),
        (
            (8, 128, 512),
            {"kv_heads": 2},
            TWO,
            [LAYER_BACKWARD[0], "small_layer_sum_heads", LAYER_BACKWARD[1]],
        ),
        ((8, 128, 512), {"gpu": "b200"}, ONE, LAYER_BACKWARD),
        ((8, 128, 512), {"dtype": torch.float32}, [""], [""]),
        ((8, 128, 512), {"gpu": "a100"}, [""], [""]),
        ((8, 128, 512), {"dtype": torch.float16}, [""], [""]),
        ((8, 129, 512), {}, [""], [""]),
    ],
)
def test_small_layers_go_by_size_and_capture(shape, options, forward, backward) -> None:
    plans = explain("self_attention_layer", shape, **{"gpu": "h200", **options}).plans
    assert [plan.kernel for plan in plans if plan.work == "forward"] == forward
    assert [plan.kernel for plan in plans if plan.work == "backward"] == backward
    assert plans[0].reason


def test_a_small_layers_scratch_is_of_the_projections_gradient() -> None:
    def scratch(**options: int) -> int:
        plans = explain("self_attention_layer", (8, 128, 512), gpu="h200", **options).plans
        return next(plan.workspace_bytes for plan in plans if plan.work == "backward")

    assert scratch() == 8 * 128 * 3 * 512 * 2
    assert scratch(kv_heads=2) == 8 * 128 * (512 + 2 * 128 + 2 * 512) * 2, "and keys and values by query head"


@pytest.mark.parametrize(
    "width, options, threads",
    [
        (768, {}, 768),
        (1024, {"layers": 24, "heads": 16}, 512),
        (1024, {"layers": 65, "heads": 16}, 0),
        (768, {"head_dim": 96}, 0),
        (768, {"gpu": "l40s"}, 0),
        (768, {"dtype": torch.float32}, 0),
        (768, {"dtype": torch.float16}, 0),
        (4096, {"heads": 32, "head_dim": 128}, 0),
    ],
)
def test_whole_steps_are_of_small_models(width, options, threads) -> None:
    (plan,) = explain("decode_step", (1, width), **{"gpu": "h200", **options}).plans
    assert plan.reason
    assert (plan.kernel, plan.threads_per_row) == ("decode_step" if threads else "", threads)
    assert plan.blocks == (132 if threads else 0)


def test_what_a_gate_adds_to_a_whole_step_is_counted() -> None:
    plain, gated = (
        explain("decode_step", (1, 768), gpu="h200", ffn_dim=2048, swiglu=swiglu).plans[0]
        for swiglu in (False, True)
    )
    assert gated.shared_bytes - plain.shared_bytes == 12 * 16 * 4, "a bias of each of 16 rows, in 12 layers"
    assert gated.workspace_bytes == plain.workspace_bytes


@pytest.mark.parametrize(
    "shape, gpu, cluster", [((1, 50257), "h200", 8), ((64, 50257), "h200", 2), ((1, 50257), "a100", 1)]
)
def test_few_long_rows_of_logits_are_shared(shape, gpu, cluster) -> None:
    (plan,) = explain("argmax_step", shape, gpu=gpu).plans
    assert (plan.kernel, plan.blocks_per_row, plan.blocks) == ("argmax_step", cluster, shape[0] * cluster)


@pytest.mark.parametrize(
    "tensors, blocks, reason",
    [
        (1, [36], "the device holds a block for each piece of 16 KB"),
        (29, [1044], "the device holds a block for each piece of 16 KB"),
        (148, [148 * 9], "a block reads a few neighboring pieces of 16 KB"),
        (1536, [7900], "blocks come in eight waves"),
        (1537, [7900, 36], "blocks come in eight waves"),
    ],
)
def test_a_norm_of_gradients_has_no_more_blocks_than_it_needs(tensors, blocks, reason) -> None:
    """Of 768 x 384 in bf16, which are 36 pieces; an H200 holds 1,056 blocks of 256 threads."""
    plans = explain("gradient_norm", (768, 384), gpu="h200", tensors=tensors).plans
    assert {plan.kernel for plan in plans} == {"gradient_norm"}
    assert [plan.blocks for plan in plans] == blocks
    assert plans[0].workspace_bytes == 4 * sum(blocks)
    assert plans[0].reason.startswith(reason)


def test_a_step_of_adamw_is_one_launch_for_376_parameters() -> None:
    for tensors, blocks in ((376, [376 * 72]), (400, [376 * 72, 24 * 72])):
        plans = explain("adamw", (768, 768), gpu="a100", tensors=tensors).plans
        assert [(plan.kernel, plan.blocks, plan.threads_per_row) for plan in plans] == [
            ("adamw", count, 256) for count in blocks
        ]
    (fp32,) = explain("adamw", (768, 768), torch.float32, gpu="a100").plans
    assert (fp32.blocks, fp32.workspace_bytes) == (144, 0)


OPTIONS: dict[str, dict[str, list[float]]] = {
    "softmax": {
        "causal": [False, False, True],
        "masked": [False, False, True],
        "scale": [1.0, 0.125, -1.0, 0.0],
    },
    "cross_entropy": {"weight": [False, False, True], "soft_cap": [0.0, 0.0, 30.0]},
    "gelu": {"bias": [False, True]},
    "swiglu": {},
    "geglu": {},
    "embedding": {"rows": [65, 30522, 400000], "positions": [False, True]},
    **{
        name: {
            "fp32_stream": [False, True],
            "fp32_weights": [False, True],
            **({"x_bias": [False, True]} if "dropout" in name else {}),
        }
        for name in NORMS
    },
}
STAYING = ("waiting", "tiled", "added", "norm_backward")
"""In names of kernels of which a block has more rows than it has at a time."""


@pytest.mark.parametrize("op", OPTIONS)
def test_every_problem_has_a_kernel_that_the_gpu_can_launch(op) -> None:
    draw = random.Random(op)
    made_up = replace(
        GPUS["h200"], name="small", processors=7, shared_per_block=101376, shared_per_processor=102400
    )
    for _ in range(2000):
        n = int(2 ** draw.uniform(0, 21))
        gpu = draw.choice([*GPUS.values(), made_up])
        dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16])
        options = {name: draw.choice(values) for name, values in OPTIONS[op].items()}
        rows = int(2 ** draw.uniform(0, 34 - n.bit_length()))
        at = draw.choice([0, 0, 4, 16])
        for plan in explain(op, (rows, n), dtype, gpu=gpu, address=at, **options).plans:
            _can_be_launched(plan, gpu, rows)


def _can_be_launched(plan: Plan, gpu, rows: int) -> None:
    assert plan.kernel
    assert plan.reason
    assert 1 <= plan.threads_per_row * plan.rows_per_block <= (640 if "norm" in plan.kernel else 512)
    assert plan.shared_bytes <= gpu.shared_per_block
    assert plan.blocks_per_row <= (16 if gpu.clusters else 1)
    assert plan.blocks % plan.blocks_per_row == 0
    if plan.elements_per_access:
        assert plan.fallback is None
        return
    if not any(name in plan.kernel for name in STAYING) and "norm_forward_held" not in plan.kernel:
        assert plan.blocks == -(-rows // plan.rows_per_block) * plan.blocks_per_row, "each row has its blocks"
    assert (plan.fallback is not None) == (plan.blocks_per_row > 8)
    if plan.fallback is not None:
        assert plan.fallback.blocks_per_row <= 8
        _can_be_launched(plan.fallback, gpu, rows)


def test_a_cluster_that_a_gpu_may_refuse_has_a_fallback() -> None:
    (plan, _) = explain("softmax", (3000, 300000), torch.float32, gpu="h100").plans
    assert plan.blocks_per_row == 16
    assert plan.fallback is not None
    assert plan.fallback.kernel == "softmax_forward_streamed"
    assert "where the GPU grants no cluster of 16: softmax_forward_streamed" in str(plan)


def test_a_fallback_needs_no_cluster_that_may_be_refused() -> None:
    (_, plan) = explain("softmax", (4804, 262144), torch.float16, gpu="h200").plans
    assert "the table of measured layouts" in plan.reason
    assert plan.blocks_per_row == 16
    assert plan.fallback is not None
    assert (plan.fallback.kernel, plan.fallback.blocks_per_row) == ("softmax_backward_streamed", 8)


def test_an_explanation_reads_well() -> None:
    assert str(ops.explain("softmax", (8192, 50257), gpu="h200")).splitlines()[:4] == [
        "softmax of [8192, 50257] in bfloat16 on h200",
        "forward: softmax_forward_waiting",
        "  because the table of measured layouts has the row wait in shared memory",
        "  16,384 blocks, 704 threads a row in a cluster of 2 blocks, 50,688 bytes of shared memory a block",
    ]


@pytest.mark.parametrize(
    "arguments, options, said",
    [
        (("softmacks", (4, 4)), {}, "Did you mean 'softmax'"),
        (("softmax", ()), {}, "one size of 1 or more"),
        (("softmax", (4, 0)), {}, "one size of 1 or more"),
        (("softmax", (4, 4), torch.float64), {}, "kernels take torch.float32"),
        (("softmax", (4, 4)), {"gpu": "h300"}, "Did you mean 'h"),
        (("softmax", (4, 4)), {"address": 3}, "stand at multiples of 2"),
        (("softmax", (4, 4)), {"soft_cap": 3.0}, "There is no option of softmax named 'soft_cap'"),
        (("cross_entropy", (4, 4)), {"weights": True}, "Did you mean 'weight'"),
        (("layer_norm", (4, 4)), {"direction": "up"}, "it is forward or backward"),
        (("layer_norm", (4, 4)), {"x_bias": True}, "norms behind a dropout"),
        (("attention", (4, 4)), {}, r"the shape of q, \[B, H, T, D\]"),
        (("attention", (1, 4, 4, 8)), {"kv_heads": 3}, "does not divide 4 heads"),
        (("attention", (1, 4, 4, 8)), {"masked": True, "bias": True}, "has one mask"),
        (("decode_attention", (4, 4)), {}, r"\[B, H, D\]"),
        (("decode_attention", (1, 4, 64)), {"cache": "fp4"}, "Did you mean 'fp8'"),
        (("self_attention_layer", (4, 4)), {}, r"the shape of x, \[B, S, E\]"),
        (("self_attention_layer", (1, 4, 64)), {"kv_heads": 3}, "does not divide 8 heads"),
        (("decode_step", (2, 768)), {}, "computes one row"),
        (("adamw", (4, 4)), {"tensors": 0}, "one parameter or more"),
    ],
)
def test_mistakes_are_named(arguments, options, said) -> None:
    with pytest.raises(InputError, match=said):
        explain(*arguments, **{"gpu": "h200", **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_one_has_to_be_named() -> None:
    with pytest.raises(InputError, match=r"There is no GPU here; name one with --gpu .*: a100"):
        explain("softmax", (4, 4))


def kernels_profiled() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(64, 1024), (40000, 4096), (20000, 197), (20000, 1000), (2048, 50257), (300, 300000)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softmax_that_is_explained_is_the_one_that_runs(shape, dtype) -> None:
    x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    ops.softmax(x).backward(grad)
    with kernels_profiled() as profile:
        ops.softmax(x).backward(grad)
        torch.cuda.synchronize()
    ran = [event.name for event in profile.events()]
    for plan in explain("softmax", shape, dtype).plans:
        names = {plan.kernel, plan.fallback.kernel if plan.fallback else plan.kernel}
        assert any(f"{name}<" in kernel for name in names for kernel in ran), (plan, ran)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 1000), (4096, 197), (8192, 50257), (100, 50257), (8, 2000000)])
def test_the_loss_that_is_explained_is_the_one_that_runs(shape) -> None:
    logits = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(shape[1], shape[:1], device="cuda")
    ops.cross_entropy(logits, target)
    with kernels_profiled() as profile:
        ops.cross_entropy(logits, target)
        torch.cuda.synchronize()
    ran = [event.name for event in profile.events()]
    (_, alone) = explain("cross_entropy", shape).plans
    assert any(f"{alone.kernel}<" in kernel for kernel in ran), (alone, ran)
