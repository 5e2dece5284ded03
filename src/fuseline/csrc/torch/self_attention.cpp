// A layer of multi-head self-attention: projections to q, k, v, attention, output projection, as one op.
//
// Two ways to the same result: in ATen's operators (self_attention_composed.cpp), and, `fused` and on a GPU where the layer
// fits, in kernels (self_attention_fused.cpp). Here are the ops: what they take, autograd, autocast and Meta.

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>

#include <string>

#include "self_attention.h"

namespace fuseline::self_attention_op {
namespace {

using namespace self_attention;

#define FUSELINE_OPTION_TYPES int64_t, int64_t, bool, bool, double, std::optional<double>, bool
#define FUSELINE_OPTION_PARAMETERS                                                                          \
    int64_t num_heads, int64_t num_kv_heads, bool causal, bool mask_hides, double dropout_p,                \
        std::optional<double> softmax_scale, bool fused
#define FUSELINE_OPTIONS \
    Options { num_heads, num_kv_heads, causal, mask_hides, dropout_p, softmax_scale, fused }
#define FUSELINE_OPTION_VALUES(o) \
    (o).num_heads, (o).num_kv_heads, (o).causal, (o).mask_hides, (o).dropout_p, (o).softmax_scale, (o).fused

// ---- the ops, as others of them call them ----

Tensor whole_op(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
                const OptionalTensor& out_bias, const OptionalTensor& mask, const OptionalTensor& seed, const Options& o) {
    constexpr Op<"self_attention_layer", Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                                                const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                                FUSELINE_OPTION_TYPES)> op;
    return op(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTION_VALUES(o));
}

Four forward_op(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
                const OptionalTensor& out_bias, const OptionalTensor& mask, const OptionalTensor& seed, const Options& o) {
    constexpr Op<"self_attention_layer_forward", Four(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                                                      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                                      FUSELINE_OPTION_TYPES)> op;
    return op(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTION_VALUES(o));
}

Five backward_op(const Tensor& grad_out, const Tensor& x, const Tensor& qkv_weight, const Tensor& out_weight,
                 const OptionalTensor& mask, const OptionalTensor& seed, const Tensor& qkv, const Tensor& attended,
                 const Tensor& weights, const Options& o, std::array<bool, 5> wanted) {
    constexpr Op<"self_attention_layer_backward", Five(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                       const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                                       const Tensor&, FUSELINE_OPTION_TYPES, std::array<bool, 5>)> op;
    return op(grad_out, x, qkv_weight, out_weight, mask, seed, qkv, attended, weights, FUSELINE_OPTION_VALUES(o), wanted);
}

// ---- what fits together ----

void check(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
           const OptionalTensor& out_bias, const OptionalTensor& mask, const OptionalTensor& seed, const Options& o) {
    cpu_type(x, kName);
    TORCH_CHECK_VALUE(o.num_heads > 0 && o.num_kv_heads > 0 && o.num_heads % o.num_kv_heads == 0, kName, ": ", o.num_heads,
                      " heads and ", o.num_kv_heads, " heads of keys; the first is a multiple of the second.");
    TORCH_CHECK_VALUE(x.dim() == 3, kName, ": x has shape ", x.sym_sizes(), "; it is [B, S, E].");
    TORCH_CHECK_VALUE(qkv_weight.dim() == 2 && out_weight.dim() == 2, kName, ": qkv_weight has shape ",
                      qkv_weight.sym_sizes(), " and out_weight ", out_weight.sym_sizes(),
                      "; they are [(H + 2 H_kv) D, E] and [out, H D].");
    if (is_shared(x, qkv_weight)) {
        TORCH_CHECK_VALUE(o.num_kv_heads == o.num_heads && qkv_weight.sym_size(0) == 3 * qkv_weight.sym_size(1) &&
                              x.sym_size(2) == o.num_heads * qkv_weight.sym_size(1),
                          kName, ": qkv_weight has shape ", qkv_weight.sym_sizes(), " for x of shape ", x.sym_sizes(), " and ",
                          o.num_heads, " heads; it is [(H + 2 H_kv) D, E], or [3 D, D] with H D = E to share one "
                          "projection among the heads.");
    } else {
        TORCH_CHECK_VALUE(qkv_weight.sym_size(0) % (o.num_heads + 2 * o.num_kv_heads) == 0, kName, ": qkv_weight has ",
                          qkv_weight.sym_size(0), " rows for ", o.num_heads, " heads of queries and ", o.num_kv_heads,
                          " of keys and values; they are (H + 2 H_kv) D.");
    }
    const auto groups = is_shared(x, qkv_weight) ? int64_t(3) : o.num_heads + 2 * o.num_kv_heads;
    const auto head_dim = qkv_weight.sym_size(0) / groups;
    TORCH_CHECK_VALUE(out_weight.sym_size(1) == o.num_heads * head_dim, kName, ": out_weight has shape ",
                      out_weight.sym_sizes(), " for ", o.num_heads, " heads of ", head_dim, "; it is [out, H D].");
    const auto matching = [&](const Tensor& given, const char* name) {
        check_device(kName, given, name, x);
        TORCH_CHECK_TYPE(given.scalar_type() == x.scalar_type(), kName, ": ", name, " is ", given.scalar_type(),
                         " and x ", x.scalar_type(), "; they have one dtype.");
    };
    matching(qkv_weight, "qkv_weight");
    matching(out_weight, "out_weight");
    const auto bias_fits = [&](const OptionalTensor& bias, const Tensor& weight, const char* name) {
        if (!bias.has_value()) return;
        matching(*bias, name);
        TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), kName, ": ", name, " has shape ",
                          bias->sym_sizes(), "; it is [", weight.sym_size(0), "].");
    };
    bias_fits(qkv_bias, qkv_weight, "qkv_bias");
    bias_fits(out_bias, out_weight, "out_bias");
    if (mask.has_value()) {
        TORCH_CHECK_TYPE(mask->scalar_type() == at::kBool, kName, ": mask is ", mask->scalar_type(), "; it is bool.");
        check_device(kName, *mask, "mask", x);
        const std::array<c10::SymInt, 4> full = {x.sym_size(0), o.num_heads, x.sym_size(1), x.sym_size(1)};
        bool fits = mask->dim() == 4;
        for (int64_t i = 0; fits && i < 4; ++i) fits = mask->sym_size(i) == 1 || mask->sym_size(i) == full[i];
        TORCH_CHECK_VALUE(fits, kName, ": mask of shape ", mask->sym_sizes(), " does not broadcast to [B, H, S, S] = [",
                          full[0], ", ", full[1], ", ", full[2], ", ", full[3], "].");
    }
    TORCH_CHECK_VALUE(o.dropout_p >= 0 && o.dropout_p <= 1, kName, ": dropout_p=", o.dropout_p,
                      " is not between 0 and 1.");
    TORCH_CHECK_VALUE(o.dropout_p == 0 || (seed.has_value() && seed->scalar_type() == at::kLong && seed->sym_numel() == 1 &&
                                           seed->device() == x.device()),
                      kName, ": dropout wants a seed, one int64 on x's device.");
}

// ---- kernels, for CPU and CUDA ----

Four run_forward(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
                 const OptionalTensor& out_bias, const OptionalTensor& mask, const OptionalTensor& seed, const Options& o,
                 bool keep) {
    check(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, o);
    const Sizes s(x, qkv_weight, out_weight, o);
    if (runs_fused(s, x, o, keep)) {
        return fused_forward(s, x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, o, keep);
    }
    const WithoutAutocast off;
    auto result = composed_forward(s, x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, o);
    if (o.fused) std::get<3>(result) = at::empty({0}, x.options());
    return result;
}

Tensor self_attention_layer(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                            const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                            const OptionalTensor& seed, FUSELINE_OPTION_PARAMETERS) {
    return std::get<0>(run_forward(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS, false));
}

Four self_attention_layer_forward(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                                  const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                                  const OptionalTensor& seed, FUSELINE_OPTION_PARAMETERS) {
    return run_forward(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS, true);
}

Five self_attention_layer_backward(const Tensor& grad_out, const Tensor& x, const Tensor& qkv_weight,
                                   const Tensor& out_weight, const OptionalTensor& mask, const OptionalTensor& seed,
                                   const Tensor& qkv, const Tensor& attended, const Tensor& weights,
                                   FUSELINE_OPTION_PARAMETERS, std::array<bool, 5> wanted) {
    const Options o = FUSELINE_OPTIONS;
    const Sizes s(x, qkv_weight, out_weight, o);
    if (runs_fused(s, x, o, true)) {
        return fused_backward(s, grad_out, x, qkv_weight, out_weight, mask, seed, qkv, attended, o, wanted);
    }
    const WithoutAutocast off;
    return composed_backward(s, grad_out, x, qkv_weight, out_weight, mask, seed, qkv, attended, weights, o, wanted);
}

// ---- Meta ----

Tensor out_like(const Tensor& x, const Tensor& out_weight) {
    return at::empty_symint({x.sym_size(0), x.sym_size(1), out_weight.sym_size(0)}, x.options());
}

Tensor self_attention_layer_meta(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                                 const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                                 const OptionalTensor& seed, FUSELINE_OPTION_PARAMETERS) {
    check(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS);
    return out_like(x, out_weight);
}

Four self_attention_layer_forward_meta(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                                       const Tensor& out_weight, const OptionalTensor& out_bias,
                                       const OptionalTensor& mask, const OptionalTensor& seed,
                                       FUSELINE_OPTION_PARAMETERS) {
    check(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS);
    const auto tokens = x.sym_size(0) * x.sym_size(1), S = x.sym_size(1);
    const auto projected = is_shared(x, qkv_weight) ? 3 * x.sym_size(2) : qkv_weight.sym_size(0);
    return {out_like(x, out_weight), at::empty_symint({tokens, projected}, x.options()),
            at::empty_symint({tokens, out_weight.sym_size(1)}, x.options()),
            fused ? at::empty({0}, x.options()) : at::empty_symint({num_heads, x.sym_size(0), S, S}, x.options())};
}

Five self_attention_layer_backward_meta(const Tensor&, const Tensor& x, const Tensor& qkv_weight, const Tensor& out_weight,
                                        const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                        const Tensor&, FUSELINE_OPTION_PARAMETERS, std::array<bool, 5> wanted) {
    const auto like = [&](bool want, c10::SymIntArrayRef sizes) {
        return want ? at::empty_symint(sizes, x.options()) : Tensor();
    };
    return {like(wanted[0], x.sym_sizes()), like(wanted[1], qkv_weight.sym_sizes()),
            like(wanted[2], qkv_weight.sym_sizes().slice(0, 1)), like(wanted[3], out_weight.sym_sizes()),
            like(wanted[4], out_weight.sym_sizes().slice(0, 1))};
}

// ---- autograd and autocast ----

struct SelfAttentionLayer : torch::autograd::Function<SelfAttentionLayer> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                          const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                          const OptionalTensor& seed, const Options& o) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        // In one list: each entry of the dictionary costs a third of a microsecond.
        const bool wanted[5] = {x.requires_grad(), qkv_weight.requires_grad(), wants_grad(qkv_bias),
                                out_weight.requires_grad(), wants_grad(out_bias)};
        int64_t flags = o.causal | o.mask_hides << 1 | o.fused << 2 | qkv_bias.has_value() << 3 | out_bias.has_value() << 4 |
                        int64_t(o.softmax_scale.has_value()) << 10;
        for (int i = 0; i < 5; ++i) flags |= int64_t(wanted[i]) << (5 + i);
        ctx->saved_data["o"] =
            std::vector<double>{double(flags), double(o.num_heads), double(o.num_kv_heads), o.dropout_p, o.softmax_scale.value_or(0)};
        auto [out, qkv, attended, weights] = forward_op(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, o);
        ctx->save_for_backward({x, qkv_weight, out_weight, mask.value_or(Tensor()), seed.value_or(Tensor()), qkv, attended,
                                weights});
        return out;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const auto options = ctx->saved_data["o"].toDoubleVector();
        const auto flags = static_cast<int64_t>(options[0]);
        // The edges of this node are the tensors that are there.
        const std::array<bool, 5> there = {true, true, (flags >> 3 & 1) != 0, true, (flags >> 4 & 1) != 0};
        std::array<bool, 5> wanted;
        size_t edge = 0;
        for (size_t i = 0; i < 5; ++i) {
            wanted[i] = there[i] && (flags >> (5 + i) & 1) != 0 && ctx->needs_input_grad(edge);
            edge += there[i];
        }
        const auto scale = (flags >> 10 & 1) != 0 ? std::optional<double>(options[4]) : std::nullopt;
        const Options o{static_cast<int64_t>(options[1]), static_cast<int64_t>(options[2]), (flags & 1) != 0,
                        (flags & 2) != 0, options[3], scale, (flags & 4) != 0};
        const Tensor qkv = at::GradMode::is_enabled() ? of_running_node(saved[5]) : saved[5];
        auto [grad_x, grad_qkv_weight, grad_qkv_bias, grad_out_weight, grad_out_bias] =
            backward_op(grads[0], saved[0], saved[1], saved[2], optional(saved[3]), optional(saved[4]), qkv, saved[6],
                        saved[7], o, wanted);
        return {grad_x, grad_qkv_weight, grad_qkv_bias, grad_out_weight, grad_out_bias, Tensor(), Tensor(), Tensor()};
    }
};

Tensor self_attention_layer_autograd(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                                     const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                                     const OptionalTensor& seed, FUSELINE_OPTION_PARAMETERS) {
    if (tracked(x, qkv_weight, qkv_bias, out_weight, out_bias)) {
        return SelfAttentionLayer::apply(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS);
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return whole_op(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS);
}

// Casts as torch's linear does, the weights once for all calls of a region.
template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor self_attention_layer_autocast(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                                     const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                                     const OptionalTensor& seed, FUSELINE_OPTION_PARAMETERS) {
    const c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKeySet(kKey)};
    const auto type = at::autocast::get_autocast_dtype(kDevice);
    const auto cast = [&](const auto& t) { return at::autocast::cached_cast(type, t, kDevice); };
    return whole_op(cast(x), cast(qkv_weight), cast(qkv_bias), cast(out_weight), cast(out_bias), mask, seed, FUSELINE_OPTIONS);
}

}  // namespace

#define FUSELINE_OPTION_SCHEMA \
    "int num_heads, int num_kv_heads, bool causal, bool mask_hides, float dropout_p, float? softmax_scale, bool fused"

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "self_attention_layer(Tensor x, Tensor qkv_weight, Tensor? qkv_bias, Tensor out_weight, Tensor? out_bias, "
              "Tensor? mask, Tensor? seed, " FUSELINE_OPTION_SCHEMA ") -> Tensor",
           self_attention_layer, self_attention_layer, self_attention_layer_meta);
    define(m, "self_attention_layer_forward(Tensor x, Tensor qkv_weight, Tensor? qkv_bias, Tensor out_weight, Tensor? out_bias, "
              "Tensor? mask, Tensor? seed, " FUSELINE_OPTION_SCHEMA ") -> (Tensor out, Tensor qkv, Tensor attended, "
              "Tensor weights)",
           self_attention_layer_forward, self_attention_layer_forward, self_attention_layer_forward_meta);
    define(m, "self_attention_layer_backward(Tensor grad_out, Tensor x, Tensor qkv_weight, Tensor out_weight, Tensor? mask, "
              "Tensor? seed, Tensor qkv, Tensor attended, Tensor weights, " FUSELINE_OPTION_SCHEMA ", bool[5] wanted) -> "
              "(Tensor grad_x, Tensor grad_qkv_weight, Tensor grad_qkv_bias, Tensor grad_out_weight, Tensor grad_out_bias)",
           self_attention_layer_backward, self_attention_layer_backward, self_attention_layer_backward_meta);
    differentiate<self_attention_layer_autograd>(m, "self_attention_layer");
    refuse_second_derivative<"self_attention_layer_backward", "self_attention_layer", self_attention_layer_backward>(m);
}

TORCH_LIBRARY_IMPL(fuseline, AutocastCUDA, m) {
    m.impl("self_attention_layer", self_attention_layer_autocast<c10::DeviceType::CUDA, c10::DispatchKey::AutocastCUDA>);
}

TORCH_LIBRARY_IMPL(fuseline, AutocastCPU, m) {
    m.impl("self_attention_layer", self_attention_layer_autocast<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>);
}

// Another file compiled after this one has its own.
#undef FUSELINE_OPTION_TYPES
#undef FUSELINE_OPTION_PARAMETERS
#undef FUSELINE_OPTION_VALUES
#undef FUSELINE_OPTION_SCHEMA
#undef FUSELINE_OPTIONS

}  // namespace fuseline::self_attention_op
