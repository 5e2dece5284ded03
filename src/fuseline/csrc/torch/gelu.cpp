// GELU of x plus a bias over the last dimension, and its gradients.
//
// On the CPU it is put together from ATen's own kernels, in float32 (float64 for float64) and rounded once at the end.

#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>

#include <array>
#include <tuple>
#include <vector>

#include "op.h"
#include "pieces.h"

namespace fuseline::gelu_op {
namespace {

using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kName = "gelu";

constexpr Op<"gelu", Tensor(const Tensor&, const OptionalTensor&, c10::string_view)> gelu_op;

constexpr Op<"gelu_backward", Two(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view, std::array<bool,
              2>)> gelu_backward_op;

void check(const Tensor& x, const OptionalTensor& bias, c10::string_view approximate) {
    cpu_type(x, kName);
    TORCH_CHECK_VALUE(approximate == "tanh" || approximate == "none", kName, ": approximate is '", approximate,
                      "'; it is 'tanh' or 'none' (the error function).");
    if (!bias.has_value()) return;
    TORCH_CHECK_VALUE(x.dim() >= 1 && bias->dim() == 1 && bias->sym_size(0) == x.sym_size(-1), kName, ": bias has shape ",
                      bias->sym_sizes(), " and x ", x.sym_sizes(), "; bias has one dimension, the last of x.");
    check_device(kName, *bias, "bias", x);
    TORCH_CHECK_TYPE(bias->scalar_type() == x.scalar_type() || bias->scalar_type() == at::kFloat, kName, ": bias is ",
                     bias->scalar_type(), " and x ", x.scalar_type(), ". It has x's dtype or float32.");
}

// x as [rows, n], n being the last dimension.
struct Rows {
    int64_t rows, n;
    explicit Rows(const Tensor& x) : n(x.dim() == 0 ? 1 : x.size(-1)) { rows = n == 0 ? 0 : x.numel() / n; }
};

int code_of(c10::string_view approximate) { return approximate == "tanh" ? FUSELINE_GELU_TANH : FUSELINE_GELU_ERF; }

int bias_dtype(const OptionalTensor& bias, int dtype) { return bias.has_value() ? kernel_dtype(*bias, kName) : dtype; }

Tensor shifted(const Tensor& x, const OptionalTensor& bias) {
    const auto type = accumulator_type(x.scalar_type());
    const Tensor wide = x.to(type);
    return bias.has_value() ? wide.add(bias->to(type)) : wide;
}

Tensor gelu_cpu(const Tensor& x, const OptionalTensor& bias, c10::string_view approximate) {
    check(x, bias, approximate);
    const auto compute = [&](Tensor& out, const Tensor& in) { at::gelu_out(out, in, approximate); };
    return in_pieces(compute, shifted(x, bias)).to(x.scalar_type());
}

Tensor gelu_cuda(const Tensor& x, const OptionalTensor& bias, c10::string_view approximate) {
    check(x, bias, approximate);
    const c10::DeviceGuard guard(x.device());
    const Tensor from = x.contiguous();
    const OptionalTensor shift = contiguous(bias);
    Tensor y = at::empty(x.sizes(), x.options());
    const Rows shape(x);
    const int dtype = kernel_dtype(x, kName);
    static const auto launch = FUSELINE_KERNEL(fuseline_gelu_forward);
    check_launch(launch(from.const_data_ptr(), data_or_null(shift), y.data_ptr(), shape.rows, shape.n,
                        code_of(approximate), dtype, bias_dtype(bias, dtype), current_stream(x)),
                 kName);
    return y;
}

Tensor gelu_meta(const Tensor& x, const OptionalTensor& bias, c10::string_view approximate) {
    check(x, bias, approximate);
    return at::empty_symint(x.sym_sizes(), x.options());
}

void check_backward(const Tensor& grad_out, const Tensor& x) {
    check_same_shape("gelu_backward", grad_out, "grad_out", x);
    check_same_dtype("gelu_backward", grad_out, "grad_out", x);
}

// The sum of each column, in double, the rows in order: the same bits for any number of threads.
template <typename A>
void column_sums(const Tensor& rows, const Rows& shape, const Tensor& sums) {
    const A* from = rows.const_data_ptr<A>();
    A* to = sums.mutable_data_ptr<A>();
    at::parallel_for(0, shape.n, row_grain(shape.rows), [&](int64_t begin, int64_t end) {
        std::vector<double> total(end - begin, 0.0);
        for (int64_t row = 0; row < shape.rows; ++row) {
            const A* values = from + row * shape.n + begin;
            for (int64_t c = 0; c < end - begin; ++c) total[c] += values[c];
        }
        for (int64_t c = begin; c < end; ++c) to[c] = static_cast<A>(total[c - begin]);
    });
}

Two gelu_backward_cpu(const Tensor& grad_out, const Tensor& x, const OptionalTensor& bias, c10::string_view approximate,
                      std::array<bool, 2> wanted) {
    check_backward(grad_out, x);
    const auto type = accumulator_type(x.scalar_type());
    const auto compute = [&](Tensor& out, const Tensor& grad, const Tensor& in) {
        at::gelu_backward_out(out, grad, in, approximate);
    };
    const Tensor wide = in_pieces(compute, grad_out.to(type), shifted(x, bias));
    Tensor grad_x, grad_bias;
    if (wanted[0]) grad_x = wide.to(x.scalar_type());
    if (wanted[1] && bias.has_value()) {
        const Tensor sums = at::empty(bias->sizes(), wide.options());
        if (type == at::kDouble) {
            column_sums<double>(wide, Rows(x), sums);
        } else {
            column_sums<float>(wide, Rows(x), sums);
        }
        grad_bias = sums.to(bias->scalar_type());
    }
    return {grad_x, grad_bias};
}

Two gelu_backward_meta(const Tensor& grad_out, const Tensor& x, const OptionalTensor& bias, c10::string_view,
                       std::array<bool, 2> wanted) {
    check_backward(grad_out, x);
    Tensor grad_x, grad_bias;
    if (wanted[0]) grad_x = at::empty_symint(x.sym_sizes(), x.options());
    if (wanted[1] && bias.has_value()) grad_bias = at::empty_symint(bias->sym_sizes(), bias->options());
    return {grad_x, grad_bias};
}

Two gelu_backward_cuda(const Tensor& grad_out, const Tensor& x, const OptionalTensor& bias,
                       c10::string_view approximate, std::array<bool, 2> wanted) {
    auto [grad_x, grad_bias] = gelu_backward_meta(grad_out, x, bias, approximate, wanted);
    const c10::DeviceGuard guard(x.device());
    const Tensor g = grad_out.contiguous(), from = x.contiguous();
    const OptionalTensor shift = contiguous(bias);
    const Rows shape(x);
    const int dtype = kernel_dtype(x, kName);
    Tensor workspace;
    if (grad_bias.defined()) {
        static const auto workspace_bytes = FUSELINE_KERNEL(fuseline_gelu_backward_workspace);
        const auto bytes = static_cast<int64_t>(workspace_bytes(shape.rows, shape.n, dtype));
        workspace = at::empty({bytes}, x.options().dtype(at::kByte));
    }
    const auto data = [](const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; };
    static const auto launch = FUSELINE_KERNEL(fuseline_gelu_backward);
    check_launch(launch(g.const_data_ptr(), from.const_data_ptr(), data_or_null(shift), data(grad_x), data(grad_bias),
                        data(workspace), shape.rows, shape.n, code_of(approximate), dtype, bias_dtype(bias, dtype),
                        current_stream(x)),
                 "gelu_backward");
    return {grad_x, grad_bias};
}

struct Gelu : torch::autograd::Function<Gelu> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& bias,
                          const std::string& approximate) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        ctx->saved_data["approximate"] = approximate;
        ctx->save_for_backward({x, bias.value_or(Tensor())});
        return gelu_op(x, bias, approximate);
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const OptionalTensor bias = optional(saved[1]);
        const std::array<bool, 2> wanted = {ctx->needs_input_grad(0), bias.has_value() && ctx->needs_input_grad(1)};
        auto [grad_x, grad_bias] =
            gelu_backward_op(grads[0], saved[0], bias, ctx->saved_data["approximate"].toStringRef(), wanted);
        return {grad_x, grad_bias, Tensor()};
    }
};

Tensor gelu_autograd(const Tensor& x, const OptionalTensor& bias, c10::string_view approximate) {
    if (tracked(x, bias)) return Gelu::apply(x, bias, std::string(approximate));
    return gelu_op.below_autograd(x, bias, approximate);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "gelu(Tensor x, Tensor? bias=None, str approximate=\"tanh\") -> Tensor", gelu_cpu, gelu_cuda, gelu_meta);
    define(m, "gelu_backward(Tensor grad_out, Tensor x, Tensor? bias, str approximate, bool[2] wanted) "
              "-> (Tensor grad_x, Tensor grad_bias)", gelu_backward_cpu, gelu_backward_cuda, gelu_backward_meta);
    differentiate<gelu_autograd>(m, "gelu");
    refuse_second_derivative<"gelu_backward", "gelu", gelu_backward_meta>(m);
}

}  // namespace fuseline::gelu_op
