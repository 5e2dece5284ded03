// softmax(scale * x + mask) over one dimension, causal if asked, and its gradient.

#include <ATen/ops/empty.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/div.h>
#include <ATen/ops/promote_types.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/sum_to_size.h>

#include <limits>

#include "op.h"

namespace fuseline::softmax_op {
namespace {

constexpr Op<"softmax", Tensor(const Tensor&, int64_t, double, bool, const OptionalTensor&)> softmax_op;

constexpr Op<"softmax_backward", Tensor(const Tensor&, const Tensor&, int64_t, double)> softmax_backward_op;

// `dim` counted from the front. A tensor without dimensions is a row of one element, as in torch.
int64_t checked_dim(const Tensor& x, int64_t dim) {
    const int64_t rank = std::max<int64_t>(1, x.dim());
    TORCH_CHECK_INDEX(-rank <= dim && dim < rank, "softmax: dim=", dim, " is out of range for x with ", x.dim(),
                      " dimensions; it goes from ", -rank, " to ", rank - 1, ".");
    return dim < 0 ? dim + rank : dim;
}

void check(const Tensor& x, int64_t dim, bool causal, const OptionalTensor& mask) {
    cpu_type(x, "softmax");
    if (!causal && !mask.has_value()) return;
    TORCH_CHECK_VALUE(x.dim() >= 2 && dim == x.dim() - 1, "softmax: causal and mask are over [..., T, S] with dim=-1, "
                      "but x has shape ", x.sym_sizes(), " and dim=", dim, ". Transpose x so that keys come last.");
    if (!mask.has_value()) return;
    TORCH_CHECK_TYPE(mask->scalar_type() == at::kBool || at::isFloatingType(mask->scalar_type()),
                     "softmax: mask has dtype ", mask->scalar_type(), "; it is either bool (True keeps a key) or of a "
                     "floating dtype (added to the scores). Convert it with mask.bool() or mask.to(x.dtype).");
    TORCH_CHECK_VALUE(mask->device() == x.device(), "softmax: mask is on ", mask->device(), " and x on ", x.device(),
                      ". Move it with mask.to(x.device).");
    const auto x_sizes = x.sym_sizes();
    const auto mask_sizes = mask->sym_sizes();
    bool fits = mask->dim() <= x.dim();
    for (int64_t i = 1; fits && i <= mask->dim(); ++i) {
        const auto& size = mask_sizes[mask->dim() - i];
        fits = size == 1 || size == x_sizes[x.dim() - i];
    }
    TORCH_CHECK_VALUE(fits, "softmax: mask of shape ", mask_sizes, " does not broadcast to x of shape ", x_sizes, ".");
}

// x with `dim` last, contiguous, and the way back. The result is contiguous in x's own order, as torch's is.
Tensor to_rows(const Tensor& x, int64_t dim) {
    if (x.dim() == 0) return x.reshape({1});
    return dim == x.dim() - 1 ? x.contiguous() : x.transpose(dim, -1).contiguous();
}

Tensor from_rows(const Tensor& y, int64_t dim, int64_t rank) {
    if (rank == 0) return y.reshape({});
    return dim == rank - 1 ? y : y.transpose(dim, -1).contiguous();
}

// x seen as [B, H, T, S], and the mask with strides to match: zero where it is broadcast. With more than four
// dimensions the leading ones are folded into B, and a mask whose strides do not fold that way is written out.
struct Problem {
    int64_t B = 1, H = 1, T = 1, S = 1;
    OptionalTensor mask;
    int64_t mask_strides[4] = {0, 0, 0, 0};

    Problem(const Tensor& rows, bool causal, const OptionalTensor& given) {
        const int64_t rank = rows.dim();
        S = rows.size(-1);
        if (!causal && !given.has_value()) {
            T = S == 0 ? 0 : rows.numel() / S;
            return;
        }
        T = rows.size(-2);
        H = rank > 2 ? rows.size(-3) : 1;
        for (int64_t i = 0; i + 3 < rank; ++i) B *= rows.size(i);
        if (!given.has_value()) return;
        const bool takes = given->scalar_type() == at::kBool || given->scalar_type() == rows.scalar_type();
        mask = takes ? *given : given->to(at::kFloat);
        if (rank > 4) mask = mask->expand(rows.sizes()).reshape({B, H, T, S});
        for (int64_t i = 1; i <= mask->dim(); ++i) mask_strides[4 - i] = mask->size(-i) == 1 ? 0 : mask->stride(-i);
    }
};

Tensor softmax_cpu(const Tensor& x, int64_t dim, double scale, bool causal, const OptionalTensor& mask) {
    dim = checked_dim(x, dim);
    check(x, dim, causal, mask);
    const Tensor rows = to_rows(x, dim);
    Tensor y = at::empty(rows.sizes(), rows.options());
    const Problem p(rows, causal, mask);
    cpu::SoftmaxForward task{rows.const_data_ptr(), data_or_null(p.mask), false, cpu::Type::f32, {}, p.B, p.H, p.T, p.S,
                             scale, causal, y.data_ptr(), cpu_type(x, "softmax")};
    std::copy_n(p.mask_strides, 4, task.mask_strides);
    if (p.mask.has_value()) {
        task.mask_is_bool = p.mask->scalar_type() == at::kBool;
        if (!task.mask_is_bool) task.mask_type = cpu_type(*p.mask, "softmax's mask");
    }
    static const auto run = FUSELINE_PICK(cpu::softmax_forward);
    if (y.numel() > 0) {
        parallel_rows(p.B * p.H * p.T, row_grain(p.S), task.scratch(),
                      [&](int64_t begin, int64_t end, void* scratch) { run(task, begin, end, scratch); });
    }
    return from_rows(y, dim, x.dim());
}

Tensor softmax_cuda(const Tensor& x, int64_t dim, double scale, bool causal, const OptionalTensor& mask) {
    dim = checked_dim(x, dim);
    check(x, dim, causal, mask);
    const c10::DeviceGuard guard(x.device());
    const Tensor rows = to_rows(x, dim);
    Tensor y = at::empty(rows.sizes(), rows.options());
    const Problem p(rows, causal, mask);
    int kind = FUSELINE_MASK_NONE;
    if (p.mask.has_value()) {
        kind = p.mask->scalar_type() == at::kBool             ? FUSELINE_MASK_BOOL
               : p.mask->scalar_type() == rows.scalar_type() ? FUSELINE_MASK_ADD
                                                              : FUSELINE_MASK_ADD_FP32;
    }
    static const auto launch = FUSELINE_KERNEL(fuseline_softmax_forward);
    if (y.numel() > 0) {
        check_launch(launch(rows.const_data_ptr(), data_or_null(p.mask), kind, p.mask_strides, p.B, p.H, p.T, p.S,
                            scale, causal, y.data_ptr(), kernel_dtype(x, "softmax"), current_stream(x)),
                     "softmax");
    }
    return from_rows(y, dim, x.dim());
}

Tensor softmax_meta(const Tensor& x, int64_t dim, double, bool causal, const OptionalTensor& mask) {
    check(x, checked_dim(x, dim), causal, mask);
    return at::empty_symint(x.sym_sizes(), x.options());
}

void check_backward(const Tensor& grad_out, const Tensor& y) {
    check_same_shape("softmax_backward", grad_out, "grad_out", y, "y");
    check_same_dtype("softmax_backward", grad_out, "grad_out", y, "y");
}

Tensor softmax_backward_cpu(const Tensor& grad_out, const Tensor& y, int64_t dim, double scale) {
    check_backward(grad_out, y);
    dim = checked_dim(y, dim);
    const Tensor g_rows = to_rows(grad_out, dim), y_rows = to_rows(y, dim);
    Tensor grad_x = at::empty(y_rows.sizes(), y_rows.options());
    if (grad_x.numel() > 0) {
        const int64_t n = y_rows.size(-1);
        const cpu::SoftmaxBackward task{g_rows.const_data_ptr(), y_rows.const_data_ptr(), grad_x.data_ptr(), n, scale,
                                        cpu_type(y, "softmax_backward")};
        static const auto run = FUSELINE_PICK(cpu::softmax_backward);
        parallel_rows(y_rows.numel() / n, row_grain(n), task.scratch(),
                      [&](int64_t begin, int64_t end, void* scratch) { run(task, begin, end, scratch); });
    }
    return from_rows(grad_x, dim, y.dim());
}

Tensor softmax_backward_cuda(const Tensor& grad_out, const Tensor& y, int64_t dim, double scale) {
    check_backward(grad_out, y);
    dim = checked_dim(y, dim);
    const c10::DeviceGuard guard(y.device());
    const Tensor g_rows = to_rows(grad_out, dim), y_rows = to_rows(y, dim);
    Tensor grad_x = at::empty(y_rows.sizes(), y_rows.options());
    if (grad_x.numel() > 0) {
        const int64_t n = y_rows.size(-1);
        static const auto launch = FUSELINE_KERNEL(fuseline_softmax_backward);
        check_launch(launch(g_rows.const_data_ptr(), y_rows.const_data_ptr(), grad_x.data_ptr(), y_rows.numel() / n, n,
                            scale, kernel_dtype(y, "softmax_backward"), current_stream(y)),
                     "softmax_backward");
    }
    return from_rows(grad_x, dim, y.dim());
}

Tensor softmax_backward_meta(const Tensor& grad_out, const Tensor& y, int64_t, double) {
    check_backward(grad_out, y);
    return at::empty_symint(y.sym_sizes(), y.options());
}

struct Softmax : torch::autograd::Function<Softmax> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t dim, double scale, bool causal,
                          const OptionalTensor& mask) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const Tensor y = softmax_op(x, dim, scale, causal, mask);
        ctx->saved_data["dim"] = dim;
        ctx->saved_data["scale"] = scale;
        ctx->save_for_backward({y, wants_grad(mask) ? *mask : Tensor()});
        return y;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const int64_t dim = ctx->saved_data["dim"].toInt();
        const double scale = ctx->saved_data["scale"].toDouble();
        const bool x_grad = ctx->needs_input_grad(0);
        const bool mask_grad = saved[1].defined() && ctx->needs_input_grad(1);
        Tensor grad_x, grad_mask;
        if (mask_grad) {
            // The mask's gradient is that of the scores, before the scale; in float32 if the mask is. The backward
            // of float32 rows takes them to sum to one, and those that were rounded to 16 bits do not.
            const auto type = at::promote_types(saved[0].scalar_type(), saved[1].scalar_type());
            Tensor y = saved[0].to(type);
            if (type != saved[0].scalar_type()) {
                y = y.div(y.sum(dim, /*keepdim=*/true).clamp_min(std::numeric_limits<float>::min()));
            }
            const Tensor grad_scores = softmax_backward_op(grads[0].to(type), y, dim, 1.0);
            grad_mask = grad_scores.sum_to_size_symint(saved[1].sym_sizes()).to(saved[1].scalar_type());
            if (x_grad) grad_x = grad_scores.mul(scale).to(saved[0].scalar_type());
        } else if (x_grad) {
            grad_x = softmax_backward_op(grads[0], saved[0], dim, scale);
        }
        return {grad_x, Tensor(), Tensor(), Tensor(), grad_mask};
    }
};

Tensor softmax_autograd(const Tensor& x, int64_t dim, double scale, bool causal, const OptionalTensor& mask) {
    if (tracked(x, mask)) return Softmax::apply(x, dim, scale, causal, mask);
    return softmax_op.below_autograd(x, dim, scale, causal, mask);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "softmax(Tensor x, int dim=-1, *, float scale=1.0, bool causal=False, Tensor? mask=None) -> Tensor",
           softmax_cpu, softmax_cuda, softmax_meta);
    define(m, "softmax_backward(Tensor grad_out, Tensor y, int dim, float scale) -> Tensor",
           softmax_backward_cpu, softmax_backward_cuda, softmax_backward_meta);
    differentiate<softmax_autograd>(m, "softmax");
    refuse_second_derivative<"softmax_backward", "softmax", softmax_backward_meta>(m);
}

}  // namespace fuseline::softmax_op
