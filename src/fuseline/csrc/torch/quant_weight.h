// The weight of a quantized linear layer, packed as the kernels have it (kernels/fuseline_quant.h) or plain, and what its
// ops ask of it, of x and of the bias.

#pragma once

#include "fuseline_quant.h"
#include "op.h"

namespace fuseline::quantized {

constexpr const char* kName = "quant_linear";

// The weight: all arguments but x and bias.
struct Weight {
    const Tensor& weight;
    const OptionalTensor& scales;
    const OptionalTensor& zeros;
    int64_t out_features;
    c10::string_view format;
    int64_t group_size;

    bool plain() const { return format == "plain"; }
    bool int4() const { return format == "int4"; }
    int code() const { return plain() ? FUSELINE_WEIGHT_16 : int4() ? FUSELINE_WEIGHT_INT4 : FUSELINE_WEIGHT_INT8; }
};

#define FUSELINE_WEIGHT_PARAMETERS \
    const Tensor &weight, const OptionalTensor &scales, const OptionalTensor &zeros
#define FUSELINE_FORMAT_PARAMETERS int64_t out_features, c10::string_view format, int64_t group_size
#define FUSELINE_WEIGHT \
    Weight { weight, scales, zeros, out_features, format, group_size }

inline c10::SymInt rounded(const c10::SymInt& value, int64_t by) { return (value + (by - 1)) / by; }

inline void check_groups(const Weight& w, const c10::SymInt& K) {
    const int64_t g = w.group_size;
    TORCH_CHECK_VALUE(g >= 32 && (g & (g - 1)) == 0, kName, ": group_size is ", g,
                      "; groups are 32, 64, 128 or another power of two.");
    const auto fits = [&](const Tensor& t) {
        return t.dim() == 4 && t.sym_size(0) == (w.out_features + 15) / 16 && t.sym_size(1) == rounded(K, g) &&
               t.sym_size(2) == 8 && t.sym_size(3) == 2;
    };
    TORCH_CHECK_VALUE(fits(*w.scales), kName, ": scales have shape ", w.scales->sym_sizes(), " for ", w.out_features,
                      " features and ", K, " inputs in groups of ", g, "; they are [tiles, groups, 8, 2].");
    if (!w.zeros.has_value()) return;
    TORCH_CHECK_TYPE(w.zeros->scalar_type() == at::kByte, kName, ": zeros are ", w.zeros->scalar_type(),
                     "; they are uint8.");
    TORCH_CHECK_VALUE(fits(*w.zeros), kName, ": zeros have shape ", w.zeros->sym_sizes(), " and scales ",
                      w.scales->sym_sizes(), "; they are alike.");
}

inline void check_weight(const Tensor& x, const c10::SymInt& K, const Weight& w) {
    TORCH_CHECK_VALUE(w.plain() || w.int4() || w.format == "int8", kName, ": format is '", w.format,
                      "'; it is 'int8', 'int4' or 'plain'.");
    TORCH_CHECK_VALUE(w.out_features >= 0, kName, ": out_features is ", w.out_features, ".");
    check_device(kName, w.weight, "weight", x);
    if (w.plain()) {
        TORCH_CHECK_VALUE(w.weight.dim() == 2 && w.weight.sym_size(0) == w.out_features && w.weight.sym_size(1) == K,
                          kName, ": weight has shape ", w.weight.sym_sizes(), " for ", w.out_features,
                          " features and x with ", K, " inputs; it is [out_features, inputs].");
        TORCH_CHECK_TYPE(w.weight.scalar_type() == x.scalar_type(), kName, ": weight is ", w.weight.scalar_type(),
                         " and x ", x.scalar_type(), "; a plain weight has x's dtype.");
        return;
    }
    TORCH_CHECK_TYPE(w.weight.scalar_type() == at::kByte, kName, ": weight is ", w.weight.scalar_type(),
                     "; a packed one is uint8.");
    const int64_t tile_bytes = w.int4() ? 512 : 1024;
    TORCH_CHECK_VALUE(w.weight.dim() == 3 && w.weight.sym_size(0) == (w.out_features + 15) / 16 &&
                          w.weight.sym_size(1) == rounded(K, 64) && w.weight.sym_size(2) == tile_bytes,
                      kName, ": weight has shape ", w.weight.sym_sizes(), " for ", w.out_features, " features and x with ",
                      K, " inputs; ", w.format, " is packed to [features / 16, inputs / 64, ", tile_bytes,
                      "], rounded up.");
    TORCH_CHECK_VALUE(w.scales.has_value(), kName, ": ", w.format, " has scales, and none are given.");
    check_device(kName, *w.scales, "scales", x);
    TORCH_CHECK_TYPE(w.scales->is_floating_point(), kName, ": scales are ", w.scales->scalar_type(), ".");
    TORCH_CHECK_VALUE(w.int4() || !w.zeros.has_value(), kName, ": zero points go with int4, not with ", w.format, ".");
    if (w.zeros.has_value()) check_device(kName, *w.zeros, "zeros", x);
    if (w.int4()) return check_groups(w, K);
    TORCH_CHECK_VALUE(w.scales->dim() == 1 && w.scales->sym_size(0) == w.out_features, kName, ": scales have shape ",
                      w.scales->sym_sizes(), " for ", w.out_features, " features; int8 has one for each.");
}

inline void check(const Tensor& x, const Weight& w, const OptionalTensor& bias) {
    cpu_type(x, kName);
    TORCH_CHECK_VALUE(x.dim() >= 1, kName, ": x has no dimensions; it is [.., inputs].");
    check_weight(x, x.sym_size(-1), w);
    if (!bias.has_value()) return;
    check_device(kName, *bias, "bias", x);
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == w.out_features, kName, ": bias has shape ",
                      bias->sym_sizes(), " for ", w.out_features, " features.");
    TORCH_CHECK_TYPE(bias->scalar_type() == x.scalar_type(), kName, ": bias is ", bias->scalar_type(), " and x ",
                     x.scalar_type(), "; they are of one dtype.");
}

}  // namespace fuseline::quantized
