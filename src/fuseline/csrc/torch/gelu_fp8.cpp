// GELU between two linear layers in fp8, and its gradient, on a GPU (fuseline/ops/fp8_mlp.py has the rest).

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "fuseline_fp8.h"
#include "fuseline_torch.h"

namespace fuseline::gelu_fp8_op {
namespace {

using OptionalTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kName = "fp8_gelu";
constexpr const char* kBackward = "fp8_gelu_backward";

// Rows as they are, at multiples of 16 bytes.
Tensor at_vectors(const Tensor& x) {
    const Tensor dense = x.contiguous();
    return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

void check(const Tensor& x, const OptionalTensor& columns, const char* what, const char* op) {
    TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has ", x.dim(), " dimensions; it is [rows, N].");
    if (!columns.has_value()) return;
    TORCH_CHECK_VALUE(columns->scalar_type() == at::kFloat && columns->device() == x.device() && columns->is_contiguous() &&
                          columns->dim() == 1 && columns->sym_size(0) == x.sym_size(1),
                      op, ": ", what, " is not float32 of ", x.sym_size(1), " elements on ", x.device(), ".");
}

int form_of(c10::string_view approximate, const char* op) {
    TORCH_CHECK_VALUE(approximate == "tanh" || approximate == "none", op, ": approximate is '", approximate,
                      "'; it is 'tanh' or 'none' (the error function).");
    return approximate == "tanh" ? FUSELINE_GELU_TANH : FUSELINE_GELU_ERF;
}

Three empty_rows(const Tensor& x, bool e5m2) {
    return {at::empty_symint(x.sym_sizes(), x.options()),
            at::empty_symint(x.sym_sizes(), x.options().dtype(e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn)),
            at::empty_symint({x.sym_size(0), 1}, x.options().dtype(at::kFloat))};
}

Three fp8_gelu_meta(const Tensor& x, const OptionalTensor& bias, c10::string_view approximate) {
    check(x, bias, "bias", kName);
    form_of(approximate, kName);
    return empty_rows(x, false);
}

Three fp8_gelu_cuda(const Tensor& x, const OptionalTensor& bias, c10::string_view approximate) {
    auto [y, rows, scales] = fp8_gelu_meta(x, bias, approximate);
    const c10::DeviceGuard guard(x.device());
    const Tensor from = at_vectors(x);
    static const auto launch = FUSELINE_KERNEL(fuseline_gelu_fp8_forward);
    check_launch(launch(from.const_data_ptr(), static_cast<const float*>(data_or_null(bias)), y.data_ptr(), rows.data_ptr(),
                        scales.data_ptr<float>(), x.size(0), x.size(1), form_of(approximate, kName), kernel_dtype(x, kName),
                        current_stream(x)),
                 kName);
    return {y, rows, scales};
}

Four fp8_gelu_backward_meta(const Tensor& grad_out, const Tensor& x, const OptionalTensor& bias, const Tensor& columns,
                            c10::string_view approximate, bool e5m2, bool bias_wanted) {
    check(x, bias, "bias", kBackward);
    check(x, columns, "columns", kBackward);
    form_of(approximate, kBackward);
    TORCH_CHECK_VALUE(grad_out.sym_sizes() == x.sym_sizes() && grad_out.scalar_type() == x.scalar_type(), kBackward,
                      ": grad_out is ", grad_out.scalar_type(), " of shape ", grad_out.sym_sizes(), ", x ", x.scalar_type(),
                      " of ", x.sym_sizes(), "; they are alike.");
    auto [grad_x, rows, scales] = empty_rows(x, e5m2);
    return {grad_x, rows, scales, bias_wanted ? at::empty_symint({x.sym_size(1)}, scales.options()) : Tensor()};
}

Four fp8_gelu_backward_cuda(const Tensor& grad_out, const Tensor& x, const OptionalTensor& bias, const Tensor& columns,
                            c10::string_view approximate, bool e5m2, bool bias_wanted) {
    auto [grad_x, rows, scales, grad_bias] =
        fp8_gelu_backward_meta(grad_out, x, bias, columns, approximate, e5m2, bias_wanted);
    const c10::DeviceGuard guard(x.device());
    const Tensor from = at_vectors(x), grad = at_vectors(grad_out);
    Tensor partials;
    if (bias_wanted) {
        static const auto blocks = FUSELINE_KERNEL(fuseline_gelu_fp8_backward_blocks);
        partials = at::empty({blocks(x.size(0), x.size(1)), x.size(1)}, scales.options());
    }
    static const auto launch = FUSELINE_KERNEL(fuseline_gelu_fp8_backward);
    check_launch(launch(grad.const_data_ptr(), from.const_data_ptr(), static_cast<const float*>(data_or_null(bias)),
                        columns.const_data_ptr<float>(), grad_x.data_ptr(), rows.data_ptr(), scales.data_ptr<float>(),
                        bias_wanted ? grad_bias.data_ptr<float>() : nullptr,
                        bias_wanted ? partials.data_ptr<float>() : nullptr, x.size(0), x.size(1),
                        form_of(approximate, kBackward), kernel_dtype(x, kBackward), e5m2 ? FUSELINE_E5M2 : FUSELINE_E4M3,
                        current_stream(x)),
                 kBackward);
    return {grad_x, rows, scales, grad_bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    m.def("fp8_gelu(Tensor x, Tensor? bias, str approximate) -> (Tensor, Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
    m.def("fp8_gelu_backward(Tensor grad_out, Tensor x, Tensor? bias, Tensor columns, str approximate, bool e5m2, "
          "bool bias_wanted) -> (Tensor, Tensor, Tensor, Tensor)",
          {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(fuseline, CUDA, m) {
    m.impl("fp8_gelu", fp8_gelu_cuda);
    m.impl("fp8_gelu_backward", fp8_gelu_backward_cuda);
}

TORCH_LIBRARY_IMPL(fuseline, Meta, m) {
    m.impl("fp8_gelu", fp8_gelu_meta);
    m.impl("fp8_gelu_backward", fp8_gelu_backward_meta);
}

}  // namespace fuseline::gelu_fp8_op
