"""The kinds of real kernels and ops: their names in profiles of GPT-2's training step, some of them cut."""

from __future__ import annotations

import pytest

from fuseline.profiling.kinds import KINDS, is_generated, kind_of, operations_in
from fuseline.profiling.text import few
from fuseline.profiling.trace import Call

KERNELS = {
    "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NNN": "products",
    "nvjet_sm90_tst_256x128_64x4_1x4_h_bz_coopA_splitK_NTT": "products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16"
    ", false": "products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>": "products",
    "ampere_sgemm_128x64_tn": "products",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4>": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x"
    "1_kernel0_0": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x"
    "1_kernel0_0": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*, void*"
    ", void*": "attention",
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": "attention",
    "void fuseline::norm_backward_ring<fuseline::RingKind<float, __nv_bfloat16, 2, 3, true, false>>": "norms",
    "void fuseline::norm_add_partials<float>": "norms",
    "void fuseline::(anonymous namespace)::adamw<__nv_bfloat16>": "optimizer",
    "fuseline::(anonymous namespace)::gradient_norm": "optimizer",
    "void fuseline::norm_forward_added<float, __nv_bfloat16>": "norms",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>": "norms",
    "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>": "norms",
    "void fuseline::head_kernel<__nv_bfloat16>": "loss",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, at::native::LogSoftM"
    "axForwardEpilogue>": "loss",
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>": "loss",
    "void fuseline::linear_gelu_kernel<__nv_bfloat16>": "products",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous n"
    "amespace)::FusedOptimizerTensorListMetadata<4>": "optimizer",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<OpaqueType<2u>"
    ", unsigned int": "copies and casts",
    "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>, "
    "std::array<char*, 1ul>>": "copies and casts",
    "Memcpy DtoD (Device -> Device)": "copies and casts",
    "Memset (Device)": "copies and casts",
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrappe"
    "r_t<float>>>": "pointwise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std:"
    ":array<char*, 3ul>>": "pointwise",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long)": "communication",
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>": "other",
    "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, long>>": "other",
    "triton_red_fused__log_softmax__log_softmax_backward_data__to_copy_add_arange_eq_expand_nll"
    "_loss_backward_nll_l": "loss",
    "triton_poi_fused__unsafe_view_gelu_gelu_backward_view_4": "pointwise",
    "triton_per_fused__to_copy_add_native_layer_norm_backward_view_5": "norms",
    "triton_red_fused__log_softmax__unsafe_view_prepare_softmax_online_view_15": "loss",
    "triton_poi_fused_cat_transpose_view_7": "copies and casts",
    "triton_poi_fused__to_copy_view_2": "copies and casts",
    "triton_poi_fused__to_copy_t": "copies and casts",
    "triton_poi_fused__to_copy_add": "pointwise",
    "triton_poi_fused_embedding": "other",
    "triton_tem_fused_mm_3": "products",
    "triton_tem_fused_flex_attention_0": "attention",
    "graph_0_cpp_fused_gelu_native_layer_norm_0": "norms",
    "cpp_fused_add_mul_pow_tanh_view_6": "pointwise",
    "something nobody has seen": "other",
}  # fmt: skip

OPS = {
    "aten::mm": "products",
    "aten::addmm": "products",
    "aten::bmm": "products",
    "aten::_scaled_dot_product_cudnn_attention_backward": "attention",
    "aten::_flash_attention_forward": "attention",
    "fuseline::attention_backward": "attention",
    "aten::native_layer_norm_backward": "norms",
    "aten::_fused_rms_norm": "norms",
    "fuseline::norm_forward": "norms",
    "fuseline::fold_norm_backward": "norms",
    "fuseline::add_rms_norm": "norms",
    "aten::nll_loss_forward": "loss",
    "aten::_log_softmax_backward_data": "loss",
    "fuseline::linear_cross_entropy_forward": "loss",
    "fuseline::cross_entropy_": "loss",
    "fuseline::mlp_backward": "products",
    "fuseline::quant_linear": "products",
    "aten::_softmax": "attention",
    "aten::gelu_backward": "pointwise",
    "aten::native_dropout": "pointwise",
    "fuseline::swiglu": "pointwise",
    "aten::copy_": "copies and casts",
    "aten::cat": "copies and casts",
    "aten::_fused_adamw_": "optimizer",
    "aten::_foreach_norm": "optimizer",
    "aten::embedding_dense_backward": "other",
    "c10d::allreduce_": "communication",
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_by_their_names(name: str):
    assert kind_of(name) == KERNELS[name]


@pytest.mark.parametrize("name", OPS)
def test_ops_by_their_names(name: str):
    assert kind_of("a kernel", Call(name, 0, 1, 1)) == OPS[name]


def test_what_launched_a_kernel_decides_before_its_name():
    assert (
        kind_of("void at::native::vectorized_elementwise_kernel<4>", Call("aten::mm", 0, 1, 1)) == "products"
    )
    conversions = Call("aten::_scaled_dot_product_cudnn_attention_backward", 0, 9, 1)
    cast = Call("aten::empty", 1, 2, 1, parent=conversions)
    assert kind_of("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", cast) == "attention"


def test_all_that_the_optimizer_launches_is_the_optimizers():
    step = Call("Optimizer.step#AdamW.step", 0, 9, 1, is_range=True)
    assert kind_of("nvjet_sm90", Call("aten::mm", 1, 2, 1, parent=step)) == "optimizer"


def test_what_inductor_says_is_in_a_kernel_decides_before_its_name():
    name = "triton_poi_fused_add_view_3"
    assert kind_of(name, None, ("add", "native_layer_norm")) == "norms"
    assert kind_of(name, None, ("view", "_to_copy")) == "copies and casts"
    assert kind_of(name, None, ("add",)) == "pointwise"


def test_generated_names_list_their_operations():
    assert operations_in("triton_per_fused__to_copy_add_5") == "_to_copy_add"
    assert operations_in("graph_3_cpp_fused_gelu_0") == "gelu"
    assert not is_generated("nvjet_sm90_tst")
    assert set(KERNELS.values()) | set(OPS.values()) == set(KINDS)


def test_a_sentence_names_three_places_and_counts_the_rest():
    assert few("h.*.ln_1, h.*.ln_2, ln_f") == "h.*.ln_1, h.*.ln_2, ln_f"
    assert few("layer1.*.conv1, layer1.*.conv2, fc, layer4.*.conv3, the model") == (
        "layer1.*.conv1, layer1.*.conv2, fc and 2 more"
    )
