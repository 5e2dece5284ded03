// A linear layer, and its gradients: three products (product.cpp).

#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>

#include <array>
#include <tuple>

#include "column_sums.h"
#include "op.h"
#include "product.h"
#include "weight_copies.h"

namespace fuseline::linear_op {
namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 3>;

constexpr const char* kName = "linear";

constexpr Op<"linear", Tensor(const Tensor&, const Tensor&, const OptionalTensor&)> forward_op;

constexpr Op<"linear_backward", Three(const Tensor&, const OptionalTensor&, const OptionalTensor&, Wanted,
                                  std::optional<at::ScalarType>)>
    backward_op;

void check(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    cpu_type(x, kName);
    TORCH_CHECK_VALUE(x.dim() >= 1 && weight.dim() == 2 && x.sym_size(-1) == weight.sym_size(1), kName, ": x has shape ",
                      x.sym_sizes(), " and weight ", weight.sym_sizes(), "; they are [..., C] and [D, C].");
    const auto like_x = [&](const Tensor& given, const char* name) {
        check_device(kName, given, name, x);
        check_same_dtype_or_float(kName, given, name, x);
    };
    like_x(weight, "weight");
    if (!bias.has_value()) return;
    like_x(*bias, "bias");
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), kName, ": bias has shape ",
                      bias->sym_sizes(), "; it is [", weight.sym_size(0), "].");
}

std::vector<c10::SymInt> sizes_of(const Tensor& x, c10::SymInt last) {
    auto sizes = x.sym_sizes().vec();
    sizes.back() = std::move(last);
    return sizes;
}

// ---- kernels, for any device ----

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    check(x, weight, bias);
    const WithoutAutocast off;
    const c10::DeviceGuard guard(x.device());
    const auto type = x.scalar_type();
    return product(rows_of(x), false, dense(lowered(weight, type)), true, lowered(bias, type)).view_symint(sizes_of(x, weight.size(0)));
}

// x is there if the weight's gradient is wanted, weight, as it was multiplied, if x's is. Gradients of weight and bias are of
// `weight_dtype`, of grad_out's dtype if it is not given.
Three linear_backward(const Tensor& grad_out, const OptionalTensor& x, const OptionalTensor& weight, Wanted wanted,
                      std::optional<at::ScalarType> weight_dtype) {
    const WithoutAutocast off;
    const c10::DeviceGuard guard(grad_out.device());
    const Tensor grad = rows_of(grad_out);
    Tensor grad_x, grad_weight, grad_bias;
    if (wanted[0]) {
        grad_x = product(grad, false, dense(*weight), false).view_symint(sizes_of(grad_out, weight->size(1)));
    }
    if (wanted[1]) {
        // In the weight's own order, so that the gradient of what it is a view of is contiguous.
        const bool turned = weight.has_value() && is_turned(*weight);
        grad_weight = turned ? product(rows_of(*x), true, grad, false, {}, weight_dtype).t()
                             : product(grad, true, rows_of(*x), false, {}, weight_dtype);
    }
    if (wanted[2]) grad_bias = column_sums(grad, weight_dtype.value_or(grad.scalar_type()));
    return {grad_x, grad_weight, grad_bias};
}

Tensor linear_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    check(x, weight, bias);
    return at::empty_symint(sizes_of(x, weight.sym_size(0)), x.options());
}

Three linear_backward_meta(const Tensor& grad_out, const OptionalTensor& x, const OptionalTensor& weight,
                           Wanted wanted, std::optional<at::ScalarType> weight_dtype) {
    const auto options = grad_out.options().dtype(weight_dtype.value_or(grad_out.scalar_type()));
    const auto of = [&](bool is_wanted, c10::SymIntArrayRef sizes) {
        return is_wanted ? at::empty_symint(sizes, options) : Tensor();
    };
    const c10::SymInt D = grad_out.sym_size(-1);
    Tensor grad_x, grad_weight;
    if (wanted[0]) grad_x = at::empty_symint(sizes_of(grad_out, weight->sym_size(1)), grad_out.options());
    if (wanted[1]) {
        const c10::SymInt C = x->sym_size(-1);
        grad_weight = weight.has_value() && is_turned(*weight) ? of(true, {C, D}).t() : of(true, {D, C});
    }
    return {grad_x, grad_weight, of(wanted[2], {D})};
}

// ---- autograd ----

struct Linear : torch::autograd::Function<Linear> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        check(x, weight, bias);
        const Tensor low = lowered(weight, x.scalar_type());
        ctx->saved_data["bias"] = bias.has_value();
        ctx->saved_data["dtype"] = static_cast<int64_t>(weight.scalar_type());
        const auto kept = [](bool keep, const Tensor& t) { return keep ? t : Tensor(); };
        ctx->save_for_backward({kept(wants_grad(weight), x), kept(wants_grad(x), low)});
        return forward_op(x, low, bias);
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const bool bias = ctx->saved_data["bias"].toBool();
        const Wanted wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1), bias && ctx->needs_input_grad(2)};
        const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
        const auto [grad_x, grad_weight, grad_bias] =
            backward_op(grads[0], optional(saved[0]), optional(saved_weight(saved[1], dtype)), wanted, dtype);
        return {grad_x, grad_weight, grad_bias};
    }
};

Tensor linear_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    return tracked(x, weight, bias) ? Linear::apply(x, weight, bias) : forward_op.below_autograd(x, weight, bias);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", linear, linear, linear_meta);
    define(m, "linear_backward(Tensor grad_out, Tensor? x, Tensor? weight, bool[3] wanted, "
              "ScalarType? weight_dtype=None) "
              "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
           linear_backward, linear_backward, linear_backward_meta);
    differentiate<linear_autograd>(m, "linear");
    refuse_second_derivative<"linear_backward", "linear", linear_backward_meta>(m);
}

}  // namespace fuseline::linear_op
