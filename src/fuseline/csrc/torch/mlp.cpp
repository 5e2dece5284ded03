// Two linear layers with GELU between, and their gradients.
//
// The GELU stands at the end of the first product and its gradient, with that of the bias, at the end of the backward's
// product with the second weight, where kernels take both (kernels/linear/linear_gelu_sm90a.cu): the forward then keeps
// GELU's slope. Elsewhere both are passes of their own (gelu.cpp), and the forward keeps z = x weight_1^T, their input.
// Weights that are views of transposed ones, such as those of transformers' Conv1D, are read as they lie.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <tuple>

#include "column_sums.h"
#include "fuseline_linear_gelu.h"
#include "op.h"
#include "product.h"
#include "weight_copies.h"

namespace fuseline::mlp_op {
namespace {

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 5>;

constexpr const char* kName = "mlp";

// ---- the ops that are called ----

constexpr Op<"mlp_forward", Three(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
              c10::string_view)> forward_op;

constexpr Op<"mlp_backward", Five(const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                                  const OptionalTensor&, const OptionalTensor&, c10::string_view, Wanted,
                                  std::optional<at::ScalarType>)>
    backward_op;

constexpr Op<"gelu", Tensor(const Tensor&, const OptionalTensor&, c10::string_view)> gelu_op;

constexpr Op<"gelu_backward", Two(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view, std::array<bool, 2>)>
    gelu_backward_op;

// ---- what is given ----

void check(const Tensor& x, const Tensor& weight_1, const OptionalTensor& bias_1, const Tensor& weight_2,
           const OptionalTensor& bias_2, c10::string_view approximate) {
    cpu_type(x, kName);
    TORCH_CHECK_VALUE(approximate == "tanh" || approximate == "none", kName, ": approximate is '", approximate,
                      "'; it is 'tanh' or 'none' (the error function).");
    TORCH_CHECK_VALUE(x.dim() >= 1 && weight_1.dim() == 2 && weight_2.dim() == 2 && x.sym_size(-1) == weight_1.sym_size(1) &&
                          weight_1.sym_size(0) == weight_2.sym_size(1),
                      kName, ": x has shape ", x.sym_sizes(), ", weight_1 ", weight_1.sym_sizes(), " and weight_2 ",
                      weight_2.sym_sizes(), "; they are [..., C], [F, C] and [D, F].");
    const auto like_x = [&](const Tensor& given, const char* name) {
        check_device(kName, given, name, x);
        check_same_dtype_or_float(kName, given, name, x);
    };
    const auto check_bias = [&](const OptionalTensor& bias, const Tensor& weight, const char* name) {
        if (!bias.has_value()) return;
        like_x(*bias, name);
        TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), kName, ": ", name, " has shape ",
                          bias->sym_sizes(), "; it is [", weight.sym_size(0), "].");
    };
    like_x(weight_1, "weight_1");
    like_x(weight_2, "weight_2");
    check_bias(bias_1, weight_1, "bias_1");
    check_bias(bias_2, weight_2, "bias_2");
}

// The shape of x but for the last dimension.
std::vector<int64_t> sizes_of(const Tensor& x, int64_t last) {
    auto sizes = x.sizes().vec();
    sizes.back() = last;
    return sizes;
}

// ---- where kernels have both ----

// Of `rows` rows: forward and backward agree on it, so that they agree on what is kept.
bool fused(const Tensor& rows, const Tensor& weight_1, const Tensor& weight_2) {
    if (!rows.is_cuda() || rows.scalar_type() != at::kBFloat16) return false;
    static const auto takes = FUSELINE_KERNEL(fuseline_linear_gelu_takes);
    return takes(rows.size(0), weight_1.size(0), weight_1.size(1), weight_2.size(0), kernel_dtype(rows, kName));
}

// A weight as it lies in memory, transposed where it is turned, from an address that bulk copies take.
Tensor as_it_lies(const Tensor& weight) { return aligned(is_turned(weight) ? weight.t() : weight); }

fuseline_linear_gelu call_of(const Tensor& left, const Tensor& right, bool turned, const Tensor& out) {
    fuseline_linear_gelu call{};
    call.left = left.const_data_ptr(), call.right = right.const_data_ptr(), call.out = out.mutable_data_ptr();
    call.rows = left.size(0), call.inner = out.size(1), call.width = left.size(1), call.turned = turned;
    call.dtype = kernel_dtype(left, kName);
    return call;
}

// gelu's slope, undefined unless it is kept, and gelu(x weight^T + bias).
Two linear_gelu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, c10::string_view approximate, bool keep) {
    const Tensor left = aligned(x), right = as_it_lies(weight), shift = bias.has_value() ? aligned(*bias) : Tensor();
    const Tensor inner = at::empty({x.size(0), weight.size(0)}, x.options()), slope = keep ? at::empty_like(inner) : Tensor();
    fuseline_linear_gelu call = call_of(left, right, is_turned(weight), inner);
    call.approximate = approximate == "tanh" ? FUSELINE_GELU_TANH : FUSELINE_GELU_ERF;
    call.bias = shift.defined() ? shift.const_data_ptr() : nullptr;
    call.slope = keep ? slope.mutable_data_ptr() : nullptr;
    static const auto launch = FUSELINE_KERNEL(fuseline_linear_gelu_forward);
    check_launch(launch(&call, current_stream(x)), kName);
    return {slope, inner};
}

// (grad_out weight) * slope, and where it is wanted the sum of its rows.
Two linear_gelu_gradient(const Tensor& grad_out, const Tensor& weight, const Tensor& slope, at::ScalarType bias_dtype,
                         bool bias_wanted) {
    constexpr int64_t kRows = 64;  // that the kernel adds up
    const Tensor left = aligned(grad_out), right = as_it_lies(weight), by = aligned(slope);
    const Tensor grad_z = at::empty({grad_out.size(0), weight.size(1)}, grad_out.options());
    fuseline_linear_gelu call = call_of(left, right, is_turned(weight), grad_z);
    call.slope = const_cast<void*>(by.const_data_ptr());
    Tensor sums;
    if (bias_wanted) {
        sums = at::empty({(call.rows + kRows - 1) / kRows, call.inner}, grad_z.options().dtype(at::kFloat));
        call.sums = sums.mutable_data_ptr<float>();
    }
    static const auto launch = FUSELINE_KERNEL(fuseline_linear_gelu_backward);
    check_launch(launch(&call, current_stream(grad_out)), "mlp_backward");
    return {grad_z, bias_wanted ? column_sums(sums, bias_dtype) : Tensor()};
}

// ---- kernels, for any device ----

// What the gradient takes, undefined unless it is kept, and gelu(rows weight_1^T + bias).
Two inner_of(const Tensor& rows, const Tensor& weight_1, const OptionalTensor& bias, const Tensor& weight_2,
             c10::string_view approximate, bool keep) {
    if (fused(rows, weight_1, weight_2)) return linear_gelu(rows, weight_1, bias, approximate, keep);
    const Tensor z = product(rows, false, dense(weight_1), true);
    return {keep ? z : Tensor(), gelu_op(z, bias, approximate)};
}

// The gradients of z and of the bias.
Two inner_gradients(const Tensor& grad, const Tensor& weight_1, const OptionalTensor& bias, const Tensor& weight_2,
                    const Tensor& kept, c10::string_view approximate, at::ScalarType bias_dtype, bool bias_wanted) {
    if (fused(grad, weight_1, weight_2)) return linear_gelu_gradient(grad, weight_2, kept, bias_dtype, bias_wanted);
    const auto [grad_z, grad_bias] =
        gelu_backward_op(product(grad, false, dense(weight_2), false), kept, bias, approximate, {true, bias_wanted});
    return {grad_z, bias_wanted ? grad_bias.to(bias_dtype) : Tensor()};
}

// The second product of `inner`, in the shape of x but for the last dimension.
Tensor out_of(const Tensor& inner, const Tensor& weight, const OptionalTensor& bias, const Tensor& x) {
    return product(inner, false, dense(weight), true, bias).view(sizes_of(x, weight.size(0)));
}

Tensor mlp(const Tensor& x, const Tensor& weight_1, const OptionalTensor& bias_1, const Tensor& weight_2,
           const OptionalTensor& bias_2, c10::string_view approximate) {
    check(x, weight_1, bias_1, weight_2, bias_2, approximate);
    const WithoutAutocast off;
    const c10::DeviceGuard guard(x.device());
    const auto type = x.scalar_type();
    const Tensor first = lowered(weight_1, type), second = lowered(weight_2, type);
    const auto inner = std::get<1>(inner_of(rows_of(x), first, lowered(bias_1, type), second, approximate, false));
    return out_of(inner, second, lowered(bias_2, type), x);
}

Three mlp_forward(const Tensor& x, const Tensor& weight_1, const OptionalTensor& bias_1, const Tensor& weight_2,
                  const OptionalTensor& bias_2, c10::string_view approximate) {
    check(x, weight_1, bias_1, weight_2, bias_2, approximate);
    const WithoutAutocast off;
    const c10::DeviceGuard guard(x.device());
    const auto type = x.scalar_type();
    const Tensor first = lowered(weight_1, type), second = lowered(weight_2, type);
    const auto [kept, inner] = inner_of(rows_of(x), first, lowered(bias_1, type), second, approximate, true);
    return {out_of(inner, second, lowered(bias_2, type), x), kept, inner};
}

// Of y = x weight^T, in the weight's own order, so that the gradient of what it is a view of is contiguous.
Tensor weight_gradient(const Tensor& grad_y, const Tensor& x, const Tensor& weight, at::ScalarType type) {
    return is_turned(weight) ? product(x, true, grad_y, false, {}, type).t() : product(grad_y, true, x, false, {}, type);
}

// x is there if weight_1's gradient is wanted, kept if x's, weight_1's or bias_1's is, inner if weight_2's is. Weights are as
// they were multiplied; gradients of weights and biases are of `weight_dtype`, of grad_out's dtype if it is not given.
Five mlp_backward(const Tensor& grad_out, const OptionalTensor& x, const Tensor& weight_1, const OptionalTensor& bias_1,
                  const Tensor& weight_2, const OptionalTensor& kept, const OptionalTensor& inner, c10::string_view approximate,
                  std::array<bool, 5> wanted, std::optional<at::ScalarType> weight_dtype) {
    const WithoutAutocast off;
    const c10::DeviceGuard guard(grad_out.device());
    const auto dtype = weight_dtype.value_or(grad_out.scalar_type());
    const Tensor grad = rows_of(grad_out);
    Tensor grad_x, grad_weight_1, grad_bias_1, grad_weight_2, grad_bias_2;
    if (wanted[0] || wanted[1] || wanted[2]) {
        Tensor grad_z;
        std::tie(grad_z, grad_bias_1) =
            inner_gradients(grad, weight_1, bias_1, weight_2, kept.value(), approximate, dtype, wanted[2]);
        if (wanted[0]) grad_x = product(grad_z, false, dense(weight_1), false).view(sizes_of(grad_out, weight_1.size(1)));
        if (wanted[1]) grad_weight_1 = weight_gradient(grad_z, rows_of(x.value()), weight_1, dtype);
    }
    if (wanted[3]) grad_weight_2 = weight_gradient(grad, inner.value(), weight_2, dtype);
    if (wanted[4]) grad_bias_2 = column_sums(grad, dtype);
    return {grad_x, grad_weight_1, grad_bias_1, grad_weight_2, grad_bias_2};
}

// ---- Meta ----

Tensor mlp_meta(const Tensor& x, const Tensor& weight_1, const OptionalTensor& bias_1, const Tensor& weight_2,
                const OptionalTensor& bias_2, c10::string_view approximate) {
    check(x, weight_1, bias_1, weight_2, bias_2, approximate);
    auto sizes = x.sym_sizes().vec();
    sizes.back() = weight_2.sym_size(0);
    return at::empty_symint(sizes, x.options());
}

Three mlp_forward_meta(const Tensor& x, const Tensor& weight_1, const OptionalTensor& bias_1, const Tensor& weight_2,
                       const OptionalTensor& bias_2, c10::string_view approximate) {
    const Tensor out = mlp_meta(x, weight_1, bias_1, weight_2, bias_2, approximate);
    c10::SymInt rows = 1;
    for (int64_t i = 0; i + 1 < x.dim(); ++i) rows = rows * x.sym_size(i);
    const std::array<c10::SymInt, 2> sizes = {rows, weight_1.sym_size(0)};
    return {out, at::empty_symint(sizes, x.options()), at::empty_symint(sizes, x.options())};
}

Five mlp_backward_meta(const Tensor& grad_out, const OptionalTensor&, const Tensor& weight_1, const OptionalTensor&,
                       const Tensor& weight_2, const OptionalTensor&, const OptionalTensor&, c10::string_view,
                       std::array<bool, 5> wanted, std::optional<at::ScalarType> weight_dtype) {
    const auto options = grad_out.options().dtype(weight_dtype.value_or(grad_out.scalar_type()));
    const auto of = [&](bool want, c10::SymIntArrayRef sizes) {
        return want ? at::empty_symint(sizes, options) : Tensor();
    };
    const auto of_weight = [&](bool want, const Tensor& weight) {
        if (!want || !is_turned(weight)) return of(want, weight.sym_sizes());
        return of(want, std::array{weight.sym_size(1), weight.sym_size(0)}).t();
    };
    auto sizes = grad_out.sym_sizes().vec();
    sizes.back() = weight_1.sym_size(1);
    return {wanted[0] ? at::empty_symint(sizes, grad_out.options()) : Tensor(), of_weight(wanted[1], weight_1), of(wanted[2], weight_1.sym_sizes().slice(0, 1)),
            of_weight(wanted[3], weight_2), of(wanted[4], weight_2.sym_sizes().slice(0, 1))};
}

// ---- autograd ----

struct Mlp : torch::autograd::Function<Mlp> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight_1, const OptionalTensor& bias_1,
                          const Tensor& weight_2, const OptionalTensor& bias_2, const std::string& approximate) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        check(x, weight_1, bias_1, weight_2, bias_2, approximate);
        const auto type = x.scalar_type();
        const Tensor first = lowered(weight_1, type), second = lowered(weight_2, type);
        const OptionalTensor shift = lowered(bias_1, type);
        auto [out, of_gelu, inner] = forward_op(x, first, shift, second, bias_2, approximate);
        ctx->saved_data["dtype"] = static_cast<int64_t>(weight_1.scalar_type());
        ctx->saved_data["approximate"] = approximate;
        ctx->saved_data["biases"] = c10::List<bool>({bias_1.has_value(), bias_2.has_value()});
        const bool grad_of_z = wants_grad(x) || wants_grad(weight_1) || wants_grad(bias_1);
        // Second derivatives are refused by what is kept: where x is not, of_gelu stands for it in the graph.
        if (wants_grad(x) && !wants_grad(weight_1)) {
            torch::autograd::impl::set_gradient_edge(of_gelu, torch::autograd::impl::gradient_edge(x));
        }
        const auto kept = [](bool keep, const Tensor& t) { return keep ? t : Tensor(); };
        ctx->save_for_backward({kept(wants_grad(weight_1), x), first, shift.value_or(Tensor()), second,
                                kept(grad_of_z, of_gelu), kept(wants_grad(weight_2), inner)});
        return out;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const auto biases = ctx->saved_data["biases"].toBoolList();
        // The edges of this node are the tensors that are there.
        const size_t second = 2 + biases.get(0);
        const Wanted wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1), biases.get(0) && ctx->needs_input_grad(2),
                               ctx->needs_input_grad(second), biases.get(1) && ctx->needs_input_grad(second + 1)};
        const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
        auto [grad_x, grad_weight_1, grad_bias_1, grad_weight_2, grad_bias_2] =
            backward_op(grads[0], optional(saved[0]), saved_weight(saved[1], dtype), optional(saved_weight(saved[2], dtype)),
                        saved_weight(saved[3], dtype), optional(saved[4]), optional(saved[5]),
                        ctx->saved_data["approximate"].toStringRef(), wanted, dtype);
        return {grad_x, grad_weight_1, grad_bias_1, grad_weight_2, grad_bias_2, Tensor()};
    }
};

Tensor mlp_autograd(const Tensor& x, const Tensor& weight_1, const OptionalTensor& bias_1, const Tensor& weight_2,
                    const OptionalTensor& bias_2, c10::string_view approximate) {
    if (tracked(x, weight_1, bias_1, weight_2, bias_2)) {
        return Mlp::apply(x, weight_1, bias_1, weight_2, bias_2, std::string(approximate));
    }
    constexpr Op<"mlp", decltype(mlp)> op;
    return op.below_autograd(x, weight_1, bias_1, weight_2, bias_2, approximate);
}

}  // namespace

// The same code on every device: the work is done by matrix products and the ops it calls.
TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "mlp(Tensor x, Tensor weight_1, Tensor? bias_1, Tensor weight_2, Tensor? bias_2=None, str approximate=\"tanh\") "
              "-> Tensor", mlp, mlp, mlp_meta);
    define(m, "mlp_forward(Tensor x, Tensor weight_1, Tensor? bias_1, Tensor weight_2, Tensor? bias_2, str approximate) "
              "-> (Tensor out, Tensor kept, Tensor inner)", mlp_forward, mlp_forward, mlp_forward_meta);
    define(m, "mlp_backward(Tensor grad_out, Tensor? x, Tensor weight_1, Tensor? bias_1, Tensor weight_2, Tensor? kept, "
              "Tensor? inner, str approximate, bool[5] wanted, ScalarType? weight_dtype=None) -> (Tensor grad_x, Tensor grad_weight_1, Tensor grad_bias_1, "
              "Tensor grad_weight_2, Tensor grad_bias_2)", mlp_backward, mlp_backward, mlp_backward_meta);
    differentiate<mlp_autograd>(m, "mlp");
    refuse_second_derivative<"mlp_backward", "mlp", mlp_backward>(m);
}

}  // namespace fuseline::mlp_op
