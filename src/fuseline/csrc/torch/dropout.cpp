// Dropout with a mask that is a function of a seed and a position, of x or of relu(x), and its gradients.
//
// dropout(x): the gradient is dropout of the incoming one with the same seed. dropout(relu(x)): the result says where
// the gradient goes, and only it is kept. On the CPU both are put together from ATen's own kernels, in float32 (float64
// for float64) and rounded once at the end.

#include "dropout.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "fuseline_dropout.h"
#include "transforms.h"

namespace fuseline::dropout_op {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr const char* kName = "dropout";

Tensor dropout_op(const Tensor& x, const Tensor& seed, double p, bool relu) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::dropout", "").typed<
        Tensor(const Tensor&, const Tensor&, double, bool)>();
    return op.call(x, seed, p, relu);
}

Tensor dropout_backward_op(const Tensor& grad_y, double p, const OptionalTensor& seed, const OptionalTensor& y) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::dropout_backward", "").typed<
        Tensor(const Tensor&, double, const OptionalTensor&, const OptionalTensor&)>();
    return op.call(grad_y, p, seed, y);
}

void check_probability(double p) {
    TORCH_CHECK_VALUE(p >= 0 && p <= 1, kName, ": dropout probability p=", p, " is not between 0 and 1.");
}

void check(const Tensor& x, double p, const Tensor& seed) {
    cpu_type(x, kName);
    check_probability(p);
    TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong, kName, ": seed is ", seed.scalar_type(), ", not Long.");
    TORCH_CHECK_VALUE(seed.sym_numel() == 1, kName, ": seed has shape ", seed.sym_sizes(), "; it is one element.");
    TORCH_CHECK_VALUE(seed.device() == x.device(), kName, ": seed is on ", seed.device(), " and x on ", x.device(), ".");
}

// Of the seed of dropout(x), or y = dropout(relu(x)).
void check_backward(const Tensor& grad_y, double p, const OptionalTensor& seed, const OptionalTensor& y) {
    TORCH_CHECK_VALUE(seed.has_value() != y.has_value(), "dropout_backward: give the seed, or y where ReLU was applied.");
    if (seed.has_value()) return check(grad_y, p, *seed);
    cpu_type(*y, kName);
    check_probability(p);
    TORCH_CHECK_VALUE(grad_y.sym_sizes() == y->sym_sizes(), "dropout_backward: grad_y has shape ", grad_y.sym_sizes(),
                      " and y ", y->sym_sizes(), "; they are the same.");
    TORCH_CHECK_TYPE(grad_y.scalar_type() == y->scalar_type(), "dropout_backward: grad_y is ", grad_y.scalar_type(),
                     " and y ", y->scalar_type(), "; they are the same.");
}

Tensor dropout_cpu(const Tensor& x, const Tensor& seed, double p, bool relu) {
    check(x, p, seed);
    const Tensor from = x.contiguous().to(accumulator_type(x.scalar_type()));
    return (relu ? from.relu() : from).mul(dropout_factors(from, p, seed)).to(x.scalar_type());
}

Tensor dropout_cuda(const Tensor& x, const Tensor& seed, double p, bool relu) {
    check(x, p, seed);
    const c10::DeviceGuard guard(x.device());
    const Tensor from = x.contiguous();
    Tensor y = at::empty(x.sizes(), x.options());
    static const auto launch = FUSELINE_KERNEL(fuseline_dropout);
    check_launch(launch(from.const_data_ptr(), y.data_ptr(), from.numel(), p, seed.const_data_ptr<int64_t>(), relu,
                        kernel_dtype(x, kName), current_stream(x)),
                 kName);
    return y;
}

Tensor dropout_meta(const Tensor& x, const Tensor& seed, double p, bool) {
    check(x, p, seed);
    return at::empty_symint(x.sym_sizes(), x.options());
}

Tensor dropout_backward_cpu(const Tensor& grad_y, double p, const OptionalTensor& seed, const OptionalTensor& y) {
    check_backward(grad_y, p, seed, y);
    if (seed.has_value()) return dropout_cpu(grad_y, *seed, p, false);
    const auto type = accumulator_type(y->scalar_type());
    const Tensor scaled = grad_y.contiguous().to(type).mul(cpu::dropout_scale(p));
    return scaled.masked_fill(y->contiguous().eq(0), 0).to(y->scalar_type());
}

Tensor dropout_backward_cuda(const Tensor& grad_y, double p, const OptionalTensor& seed, const OptionalTensor& y) {
    check_backward(grad_y, p, seed, y);
    if (seed.has_value()) return dropout_cuda(grad_y, *seed, p, false);
    const c10::DeviceGuard guard(y->device());
    const Tensor grad = grad_y.contiguous(), made = y->contiguous();
    Tensor grad_x = at::empty(y->sizes(), y->options());
    static const auto launch = FUSELINE_KERNEL(fuseline_relu_dropout_backward);
    check_launch(launch(grad.const_data_ptr(), made.const_data_ptr(), grad_x.data_ptr(), made.numel(), p,
                        kernel_dtype(made, kName), current_stream(made)),
                 "dropout_backward");
    return grad_x;
}

Tensor dropout_backward_meta(const Tensor& grad_y, double p, const OptionalTensor& seed, const OptionalTensor& y) {
    check_backward(grad_y, p, seed, y);
    return at::empty_symint(grad_y.sym_sizes(), grad_y.options());
}

struct DropoutFunction : torch::autograd::Function<DropoutFunction> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& seed, double p, bool relu) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const Tensor y = dropout_op(x, seed, p, relu);
        ctx->saved_data["p"] = p;
        ctx->saved_data["relu"] = relu;
        ctx->save_for_backward({relu ? y : seed});
        return y;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const double p = ctx->saved_data["p"].toDouble();
        const bool relu = ctx->saved_data["relu"].toBool();
        const OptionalTensor seed = relu ? std::nullopt : OptionalTensor(saved[0]);
        const OptionalTensor y = relu ? OptionalTensor(saved[0]) : std::nullopt;
        return {dropout_backward_op(grads[0], p, seed, y), Tensor(), Tensor(), Tensor()};
    }
};

Tensor dropout_autograd(const Tensor& x, const Tensor& seed, double p, bool relu) {
    if (at::GradMode::is_enabled() && wants_grad(x)) return DropoutFunction::apply(x, seed, p, relu);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return dropout_op(x, seed, p, relu);
}

Tensor dropout_backward_autograd(const Tensor& grad_y, double p, const OptionalTensor& seed, const OptionalTensor& y) {
    const Tensor grad_x = [&] {
        const at::AutoDispatchBelowADInplaceOrView guard;
        return dropout_backward_op(grad_y, p, seed, y);
    }();
    if (!at::GradMode::is_enabled() || !(wants_grad(grad_y) || wants_grad(y))) return grad_x;
    return NoSecondDerivative::apply(grad_x, grad_y, y.value_or(grad_y), std::string(kName));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    m.def("dropout(Tensor x, Tensor seed, float p=0.5, bool relu=False) -> Tensor", {at::Tag::pt2_compliant_tag});
    m.def("dropout_backward(Tensor grad_y, float p, Tensor? seed, Tensor? y) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(fuseline, CPU, m) {
    m.impl("dropout", dropout_cpu);
    m.impl("dropout_backward", dropout_backward_cpu);
}

TORCH_LIBRARY_IMPL(fuseline, CUDA, m) {
    m.impl("dropout", dropout_cuda);
    m.impl("dropout_backward", dropout_backward_cuda);
}

TORCH_LIBRARY_IMPL(fuseline, Meta, m) {
    m.impl("dropout", dropout_meta);
    m.impl("dropout_backward", dropout_backward_meta);
}

TORCH_LIBRARY_IMPL(fuseline, Autograd, m) {
    impl_autograd<dropout_autograd>(m, "dropout");
    impl_autograd<dropout_backward_autograd>(m, "dropout_backward");
}

}  // namespace fuseline::dropout_op
