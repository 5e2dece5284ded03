// A linear layer for few rows with the norm before it and the activation and sum after it, in one launch on CUDA.
//
// For inference: there is no gradient. Other devices, and what the kernel does not take, are put together in Python.
// `next_weight` is what the layer after this one reads: the L2 is asked for some of it while this launch ends.

#include <ATen/ops/empty.h>

#include "fuseline_quant.h"
#include "op.h"

namespace fuseline::fused_linear_op {
namespace {


constexpr const char* kName = "fused_linear";

struct Around {
    int norm, activation;
};

Around around(c10::string_view norm, c10::string_view activation) {
    const auto one_of = [](c10::string_view name, std::initializer_list<const char*> names, const char* what) {
        int code = 0;
        for (const char* known : names) {
            if (name == known) return code;
            ++code;
        }
        TORCH_CHECK_VALUE(false, kName, ": there is no ", what, " named '", name, "'.");
    };
    return {one_of(norm, {"none", "rms", "layer"}, "norm"),
            one_of(activation, {"none", "gelu", "gelu_tanh", "swiglu"}, "activation")};
}

int64_t features(int64_t out_features, c10::string_view activation) {
    return activation == "swiglu" ? out_features / 2 : out_features;
}

void check_row(const OptionalTensor& row, const Tensor& x, int64_t length, const char* name) {
    if (!row.has_value()) return;
    TORCH_CHECK_VALUE(row->dim() == 1 && row->size(0) == length && row->is_contiguous() &&
                          row->scalar_type() == x.scalar_type() && row->device() == x.device(),
                      kName, ": ", name, " is ", row->scalar_type(), " of shape ", row->sizes(), "; it is ", x.scalar_type(),
                      " [", length, "], on x's device.");
}

void check_dense(const Tensor& given, const Tensor& x, const char* name) {
    TORCH_CHECK_VALUE(given.is_contiguous() && given.device() == x.device(), kName, ": ", name, " has strides ", given.strides(),
                      " on ", given.device(), "; it is dense, on x's device, ", x.device(), ".");
}

Tensor fused_linear_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& scales, const OptionalTensor& zeros,
                         const OptionalTensor& bias, const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                         const OptionalTensor& residual, int64_t out_features, c10::string_view format,
                         int64_t group_size, c10::string_view norm, double eps, c10::string_view activation,
                         const OptionalTensor& next_weight) {
    TORCH_CHECK_VALUE(x.dim() == 2 && (x.size(1) == 1 || x.stride(1) == 1), kName, ": x has shape ", x.sizes(),
                      "; it is [rows, inputs] of unit stride.");
    TORCH_CHECK_TYPE(x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16, kName, " takes float16 and bfloat16, not ",
                     x.scalar_type(), ".");
    const int64_t M = x.size(0), K = x.size(1), tiles = (out_features + 15) / 16;
    const bool plain = format == "plain", int4 = format == "int4";
    TORCH_CHECK_VALUE(plain || int4 || format == "int8", kName, ": format is '", format, "'; it is 'plain', 'int8' or 'int4'.");
    check_dense(weight, x, "weight");
    if (plain) {
        TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) == out_features && weight.size(1) == K &&
                              weight.scalar_type() == x.scalar_type(),
                          kName, ": weight is ", weight.scalar_type(), " of shape ", weight.sizes(), "; it is ", x.scalar_type(),
                          " [", out_features, ", ", K, "].");
    } else {
        TORCH_CHECK_VALUE(weight.scalar_type() == at::kByte && weight.numel() == tiles * ((K + 63) / 64) * (int4 ? 512 : 1024),
                          kName, ": weight is ", weight.scalar_type(), " of shape ", weight.sizes(), ", not ", format, " of [",
                          out_features, ", ", K, "].");
        const int64_t groups = int4 ? (K + group_size - 1) / std::max<int64_t>(1, group_size) : 1;
        TORCH_CHECK_VALUE(scales.has_value() && scales->is_contiguous() &&
                              scales->scalar_type() == (int4 ? at::kBFloat16 : at::kFloat) &&
                              scales->numel() == (int4 ? tiles * groups * 16 : out_features),
                          kName, ": scales are not those of ", format, " [", out_features, ", ", K, "] in groups of ",
                          group_size, "; fuseline.quant.quantize_linear makes them.");
        check_dense(*scales, x, "scales");
        TORCH_CHECK_VALUE(!zeros.has_value() || (int4 && zeros->is_contiguous() && zeros->scalar_type() == at::kByte &&
                                                 zeros->numel() == tiles * groups * 16),
                          kName, ": zeros are not those of ", format, " [", out_features, ", ", K, "] in groups of ",
                          group_size, "; fuseline.quant.quantize_linear makes them.");
        if (zeros.has_value()) check_dense(*zeros, x, "zeros");
    }
    const Around with = around(norm, activation);
    check_row(bias, x, out_features, "bias");
    check_row(norm_weight, x, K, "norm_weight");
    check_row(norm_bias, x, K, "norm_bias");
    if (next_weight.has_value()) check_dense(*next_weight, x, "next_weight");
    const c10::DeviceGuard guard(x.device());
    Tensor y = at::empty({M, features(out_features, activation)}, x.options());
    if (residual.has_value()) {
        TORCH_CHECK_VALUE(residual->sizes() == y.sizes() && residual->is_contiguous() &&
                              residual->scalar_type() == x.scalar_type() && residual->device() == x.device(),
                          kName, ": residual is ", residual->scalar_type(), " of shape ", residual->sizes(), "; it is that of y, ",
                          y.sizes(), ", dense.");
    }
    if (y.numel() == 0) return y;
    fuseline_linear call{};
    call.format = plain ? FUSELINE_WEIGHT_16 : int4 ? FUSELINE_WEIGHT_INT4 : FUSELINE_WEIGHT_INT8;
    call.dtype = kernel_dtype(x, kName);
    call.x = x.const_data_ptr(), call.weight = weight.const_data_ptr(), call.y = y.mutable_data_ptr();
    call.scales = data_or_null(scales), call.zeros = data_or_null(zeros), call.bias = data_or_null(bias);
    call.m = M, call.n = out_features, call.k = K, call.x_stride = x.stride(0), call.weight_stride = K;
    call.group_size = group_size;
    call.norm = with.norm, call.norm_weight = data_or_null(norm_weight), call.norm_bias = data_or_null(norm_bias);
    call.eps = eps, call.activation = with.activation, call.residual = data_or_null(residual);
    call.overlap = 1;
    if (next_weight.has_value()) {
        call.next_weight = next_weight->const_data_ptr(), call.next_bytes = int64_t(next_weight->nbytes());
    }
    static const auto launch = FUSELINE_KERNEL(fuseline_quant_linear);
    check_launch(launch(&call, current_stream(x)), kName);
    return y;
}

Tensor fused_linear_meta(const Tensor& x, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                         const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t out_features,
                         c10::string_view, int64_t, c10::string_view, double, c10::string_view activation,
                         const OptionalTensor&) {
    return at::empty_symint({x.sym_size(0), features(out_features, activation)}, x.options());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define_on_cuda(m, "fused_linear(Tensor x, Tensor weight, Tensor? scales, Tensor? zeros, Tensor? bias, Tensor? norm_weight, "
                      "Tensor? norm_bias, Tensor? residual, int out_features, str format, int group_size, str norm, float eps, "
                      "str activation, Tensor? next_weight=None) -> Tensor", fused_linear_cuda, fused_linear_meta);
}

}  // namespace fuseline::fused_linear_op
