// Dropout with a mask that is a function of a seed and a position, of x or of relu(x), and its gradients.
//
// dropout(x): the gradient is dropout of the incoming one with the same seed. dropout(relu(x)): the result says where
// the gradient goes, and only it is kept. On the CPU both are put together from ATen's own kernels, in float32 (float64
// for float64) and rounded once at the end.

#include "dropout.h"

#include <ATen/ops/empty.h>

#include "column_sums.h"
#include "fuseline_dropout.h"
#include "op.h"

namespace fuseline::dropout_op {
namespace {

using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kName = "dropout";

constexpr Op<"dropout", Tensor(const Tensor&, const Tensor&, double, bool)> dropout_op;

constexpr Op<"dropout_backward", Tensor(const Tensor&, double, const OptionalTensor&,
              const OptionalTensor&)> dropout_backward_op;

void check(const Tensor& x, double p, const Tensor& seed) {
    cpu_type(x, kName);
    check_probability(kName, p);
    check_seed(kName, seed, x);
}

// Of the seed of dropout(x), or y = dropout(relu(x)).
void check_backward(const Tensor& grad_y, double p, const OptionalTensor& seed, const OptionalTensor& y) {
    TORCH_CHECK_VALUE(seed.has_value() != y.has_value(), "dropout_backward: give the seed, or y where ReLU was applied.");
    if (seed.has_value()) return check(grad_y, p, *seed);
    cpu_type(*y, kName);
    check_probability(kName, p);
    check_same_shape("dropout_backward", grad_y, "grad_y", *y, "y");
    check_same_dtype("dropout_backward", grad_y, "grad_y", *y, "y");
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

// Of dropout(relu(x)): the gradient of x, and the sums of its columns, the last dimension's.
Two relu_dropout_backward_sums(const Tensor& grad_y, const Tensor& y, double p) {
    const OptionalTensor made(y.contiguous());
    check_backward(grad_y, p, std::nullopt, made);
    TORCH_CHECK_VALUE(y.dim() >= 1, "relu_dropout_backward_sums: y has no dimension; it is [..., n].");
    if (y.is_cuda() && y.scalar_type() != at::kDouble) {
        const c10::DeviceGuard guard(y.device());
        const int64_t n = y.size(-1), rows = n == 0 ? 0 : y.numel() / n;
        const int dtype = kernel_dtype(y, kName);
        const Tensor grad = grad_y.contiguous(), grad_x = at::empty(y.sizes(), y.options()), sums = at::empty({n}, y.options());
        static const auto bytes = FUSELINE_KERNEL(fuseline_column_sums_workspace);
        static const auto launch = FUSELINE_KERNEL(fuseline_relu_dropout_backward_sums);
        const Tensor workspace = at::empty({int64_t(bytes(rows, n, dtype))}, y.options().dtype(at::kByte));
        const int code = launch(grad.const_data_ptr(), made->const_data_ptr(), grad_x.mutable_data_ptr(),
                                sums.mutable_data_ptr(), workspace.mutable_data_ptr(), rows, n, p, dtype, current_stream(y));
        if (code != FUSELINE_UNSUPPORTED) {
            check_launch(code, "relu_dropout_backward_sums");
            return {grad_x, sums};
        }
    }
    const Tensor grad_x = dropout_backward_op(grad_y, p, std::nullopt, made);
    return {grad_x, column_sums(rows_of(grad_x), grad_x.scalar_type())};
}

Two relu_dropout_backward_sums_meta(const Tensor& grad_y, const Tensor& y, double p) {
    const Tensor grad_x = dropout_backward_meta(grad_y, p, std::nullopt, y);
    return {grad_x, at::empty_symint({y.sym_size(-1)}, y.options())};
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
    return tracked(x) ? DropoutFunction::apply(x, seed, p, relu) : dropout_op.below_autograd(x, seed, p, relu);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "dropout(Tensor x, Tensor seed, float p=0.5, bool relu=False) -> Tensor",
           dropout_cpu, dropout_cuda, dropout_meta);
    define(m, "dropout_backward(Tensor grad_y, float p, Tensor? seed, Tensor? y) -> Tensor",
           dropout_backward_cpu, dropout_backward_cuda, dropout_backward_meta);
    define(m, "relu_dropout_backward_sums(Tensor grad_y, Tensor y, float p) -> (Tensor grad_x, Tensor sums)",
           relu_dropout_backward_sums, relu_dropout_backward_sums, relu_dropout_backward_sums_meta);
    differentiate<dropout_autograd>(m, "dropout");
    refuse_second_derivative<"dropout_backward", "dropout", dropout_backward_meta>(m);
    refuse_second_derivative<"relu_dropout_backward_sums", "dropout", relu_dropout_backward_sums_meta>(m);
}

}  // namespace fuseline::dropout_op
