// GELU or SwiGLU between two linear layers in fp8, and its gradient, on a GPU (fuseline/ops/fp8_mlp.py has the rest).

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <optional>
#include <tuple>

#include "fuseline_fp8.h"
#include "op.h"

namespace fuseline::activation_fp8_op {
namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kName = "fp8_activation";
constexpr const char* kBackward = "fp8_activation_backward";

void check(const Tensor& x, const OptionalTensor& columns, const char* what, const char* op) {
    TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has ", x.dim(), " dimensions; it is [rows, N].");
    if (!columns.has_value()) return;
    TORCH_CHECK_VALUE(columns->scalar_type() == at::kFloat && columns->device() == x.device() && columns->dim() == 1 &&
                          columns->sym_size(0) == x.sym_size(1),
                      op, ": ", what, " is not float32 of ", x.sym_size(1), " elements on ", x.device(), ".");
}

int form_of(c10::string_view activation, const char* op) {
    if (activation == "tanh") return FUSELINE_GELU_TANH;
    if (activation == "none") return FUSELINE_GELU_ERF;
    TORCH_CHECK_VALUE(activation == "swiglu", op, ": activation is '", activation,
                      "'; it is 'swiglu', or GELU's 'tanh' or 'none' (the error function).");
    return FUSELINE_SILU;
}

c10::SymInt width_of(const Tensor& x, int form) { return form == FUSELINE_SILU ? x.sym_size(1) / 2 : x.sym_size(1); }

Three empty_rows(const Tensor& x, c10::SymInt n, bool e5m2) {
    const c10::SymInt sizes[] = {x.sym_size(0), n};
    return {at::empty_symint(sizes, x.options()),
            at::empty_symint(sizes, x.options().dtype(e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn)),
            at::empty_symint({x.sym_size(0), 1}, x.options().dtype(at::kFloat))};
}

Three forward_meta(const Tensor& x, const OptionalTensor& bias, c10::string_view activation) {
    check(x, bias, "bias", kName);
    return empty_rows(x, width_of(x, form_of(activation, kName)), false);
}

Three forward_cuda(const Tensor& x, const OptionalTensor& bias, c10::string_view activation) {
    auto [y, rows, scales] = forward_meta(x, bias, activation);
    const c10::DeviceGuard guard(x.device());
    const Tensor from = vectors(x);
    const OptionalTensor added = vectors(bias);
    static const auto launch = FUSELINE_KERNEL(fuseline_activation_fp8_forward);
    check_launch(launch(from.const_data_ptr(), static_cast<const float*>(data_or_null(added)), y.data_ptr(), rows.data_ptr(),
                        scales.data_ptr<float>(), y.size(0), y.size(1), form_of(activation, kName), kernel_dtype(x, kName),
                        current_stream(x)),
                 kName);
    return {y, rows, scales};
}

Four backward_meta(const Tensor& grad_out, const Tensor& x, const OptionalTensor& bias, const Tensor& columns,
                   c10::string_view activation, bool e5m2, bool bias_wanted) {
    check(x, bias, "bias", kBackward);
    check(x, columns, "columns", kBackward);
    const c10::SymInt n = width_of(x, form_of(activation, kBackward));
    TORCH_CHECK_VALUE(grad_out.dim() == 2 && grad_out.sym_size(0) == x.sym_size(0) && grad_out.sym_size(1) == n &&
                          grad_out.scalar_type() == x.scalar_type(),
                      kBackward, ": grad_out is ", grad_out.scalar_type(), " of shape ", grad_out.sym_sizes(), ", x ",
                      x.scalar_type(), " of ", x.sym_sizes(),
                      "; they have the same dtype, and grad_out the shape of the result.");
    auto [grad_x, rows, scales] = empty_rows(x, x.sym_size(1), e5m2);
    return {grad_x, rows, scales, bias_wanted ? at::empty_symint({x.sym_size(1)}, scales.options()) : Tensor()};
}

Four backward_cuda(const Tensor& grad_out, const Tensor& x, const OptionalTensor& bias, const Tensor& columns,
                   c10::string_view activation, bool e5m2, bool bias_wanted) {
    auto [grad_x, rows, scales, grad_bias] = backward_meta(grad_out, x, bias, columns, activation, e5m2, bias_wanted);
    const c10::DeviceGuard guard(x.device());
    const Tensor from = vectors(x), grad = vectors(grad_out), factors = vectors(columns);
    const OptionalTensor added = vectors(bias);
    Tensor partials;
    if (bias_wanted) {
        static const auto count = FUSELINE_KERNEL(fuseline_activation_fp8_partials);
        partials = at::empty({count(x.size(0), x.size(1)), x.size(1)}, scales.options());
    }
    static const auto launch = FUSELINE_KERNEL(fuseline_activation_fp8_backward);
    check_launch(launch(grad.const_data_ptr(), from.const_data_ptr(), static_cast<const float*>(data_or_null(added)),
                        factors.const_data_ptr<float>(), grad_x.data_ptr(), rows.data_ptr(), scales.data_ptr<float>(),
                        bias_wanted ? grad_bias.data_ptr<float>() : nullptr,
                        bias_wanted ? partials.data_ptr<float>() : nullptr, grad.size(0), grad.size(1),
                        form_of(activation, kBackward), kernel_dtype(x, kBackward), e5m2 ? FUSELINE_E5M2 : FUSELINE_E4M3,
                        current_stream(x)),
                 kBackward);
    return {grad_x, rows, scales, grad_bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define_on_cuda(m, "fp8_activation(Tensor x, Tensor? bias, str activation) -> (Tensor, Tensor, Tensor)",
                   forward_cuda, forward_meta);
    define_on_cuda(m, "fp8_activation_backward(Tensor grad_out, Tensor x, Tensor? bias, Tensor columns, str activation, bool e5m2, "
                      "bool bias_wanted) -> (Tensor, Tensor, Tensor, Tensor)", backward_cuda, backward_meta);
}

}  // namespace fuseline::activation_fp8_op
