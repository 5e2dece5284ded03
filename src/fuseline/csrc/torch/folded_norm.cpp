// A norm's weight and bias in the linear layer that reads the norm, and the gradients of all of them, in float32
// (kernels/linear/folded_norm.cu). nn/folded_norm.py has the formulas, and what runs elsewhere.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <tuple>

#include "fuseline_kernels.h"
#include "op.h"

namespace fuseline::folded_norm_op {
namespace {

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kName = "fold_norm";

void check(const Tensor& weight, const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift) {
    TORCH_CHECK_VALUE(weight.dim() == 2, kName, ": weight has shape ", weight.sym_sizes(), "; it is [F, C].");
    const auto check_one = [&](const OptionalTensor& given, const char* name, const c10::SymInt& size) {
        if (!given.has_value()) return;
        check_device(kName, *given, name, weight, "weight");
        check_same_dtype(kName, *given, name, weight, "weight");
        TORCH_CHECK_VALUE(given->dim() == 1 && given->sym_size(0) == size, kName, ": ", name, " has shape ", given->sym_sizes(),
                          "; it is [", size, "].");
    };
    TORCH_CHECK_TYPE(weight.scalar_type() == at::kFloat, kName, ": weight is ", weight.scalar_type(), "; it is Float.");
    check_one(bias, "bias", weight.sym_size(0));
    check_one(scale, "scale", weight.sym_size(1));
    check_one(shift, "shift", weight.sym_size(1));
}

const float* data(const OptionalTensor& given) { return given.has_value() ? given->const_data_ptr<float>() : nullptr; }

OptionalTensor contiguous_or_none(const OptionalTensor& given) {
    return given.has_value() ? OptionalTensor(given->contiguous()) : std::nullopt;
}

// The second result is there if shift is.
Two fold_norm_meta(const Tensor& weight, const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift) {
    check(weight, bias, scale, shift);
    return {at::empty_symint(weight.sym_sizes(), weight.options()),
            shift.has_value() ? at::empty_symint({weight.sym_size(0)}, weight.options()) : Tensor()};
}

Two fold_norm_cuda(const Tensor& weight, const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift) {
    const c10::DeviceGuard guard(weight.device());
    auto [folded, added] = fold_norm_meta(weight, bias, scale, shift);
    const Tensor given = weight.contiguous(), by = scale.contiguous();
    const OptionalTensor from = contiguous_or_none(bias), plus = contiguous_or_none(shift);
    static const auto launch = FUSELINE_KERNEL(fuseline_fold_norm_forward);
    check_launch(launch(given.const_data_ptr<float>(), data(from), by.const_data_ptr<float>(), data(plus),
                        folded.mutable_data_ptr<float>(), added.defined() ? added.mutable_data_ptr<float>() : nullptr, weight.size(0),
                        weight.size(1), current_stream(weight)),
                 kName);
    return {folded, added};
}

// The last result is there if shift is. grad is that of the folded weight, grad_added that of the bias.
Three fold_norm_backward_meta(const Tensor& grad, const OptionalTensor& grad_added, const Tensor& weight, const Tensor& scale,
                              const OptionalTensor& shift) {
    check(weight, grad_added, scale, shift);
    check_same_shape(kName, grad, "grad", weight, "weight");
    check_same_dtype(kName, grad, "grad", weight, "weight");
    const auto row = [&] { return at::empty_symint({weight.sym_size(1)}, weight.options()); };
    return {at::empty_symint(weight.sym_sizes(), weight.options()), row(), shift.has_value() ? row() : Tensor()};
}

Three fold_norm_backward_cuda(const Tensor& grad, const OptionalTensor& grad_added, const Tensor& weight, const Tensor& scale,
                              const OptionalTensor& shift) {
    check(weight, grad_added, scale, shift);
    check_same_shape(kName, grad, "grad", weight, "weight");
    const c10::DeviceGuard guard(weight.device());
    const int64_t rows = weight.size(0), n = weight.size(1);
    const Tensor of = grad.contiguous(), given = weight.contiguous(), by = scale.contiguous();
    const OptionalTensor of_added = contiguous_or_none(grad_added), plus = contiguous_or_none(shift);
    const Tensor grad_weight = at::empty({rows, n}, weight.options()), vectors = at::empty({2, n}, weight.options());
    static const auto workspace_bytes = FUSELINE_KERNEL(fuseline_fold_norm_backward_workspace);
    const Tensor workspace = at::empty({int64_t(workspace_bytes(rows, n))}, weight.options().dtype(at::kByte));
    static const auto launch = FUSELINE_KERNEL(fuseline_fold_norm_backward);
    check_launch(launch(of.const_data_ptr<float>(), data(of_added), given.const_data_ptr<float>(), by.const_data_ptr<float>(),
                        data(plus), grad_weight.mutable_data_ptr<float>(), vectors.mutable_data_ptr<float>(),
                        workspace.mutable_data_ptr(), rows, n, current_stream(weight)),
                 kName);
    return {grad_weight, vectors.select(0, 0), shift.has_value() ? vectors.select(0, 1) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define_on_cuda(m, "fold_norm(Tensor weight, Tensor? bias, Tensor scale, Tensor? shift) -> (Tensor folded, Tensor added)",
                   fold_norm_cuda, fold_norm_meta);
    define_on_cuda(m, "fold_norm_backward(Tensor grad, Tensor? grad_added, Tensor weight, Tensor scale, Tensor? shift) -> "
                      "(Tensor grad_weight, Tensor grad_scale, Tensor grad_shift)",
                   fold_norm_backward_cuda, fold_norm_backward_meta);
}

}  // namespace fuseline::folded_norm_op
