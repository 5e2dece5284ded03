// What the norms' callers pass: whether it fits together, and how it lies in memory.

#include "norms.h"

namespace fuseline {
namespace {

// 16 bits that a float32 is rounded to.
bool narrows(at::ScalarType from, at::ScalarType to) {
    return from == at::kFloat && (to == at::kHalf || to == at::kBFloat16);
}

void check_affine(const NormArguments& a, const OptionalTensor& given, const char* name) {
    if (!given.has_value()) return;
    TORCH_CHECK_VALUE(given->sym_sizes() == Shape(a.shape), a.op, ": ", name, " has shape ", given->sym_sizes(),
                      ", but normalized_shape is ", Shape(a.shape), "; they are the same.");
    check_device(a.op, *given, name, a.x);
    TORCH_CHECK_TYPE(given->scalar_type() == a.y_type() || given->scalar_type() == at::kFloat, a.op, ": ", name, " is ",
                     given->scalar_type(), " and the result ", a.y_type(), ". It has the result's dtype or float32.");
}

void check_same(const NormArguments& a, const OptionalTensor& one, const OptionalTensor& other, const char* names) {
    TORCH_CHECK_TYPE(!one.has_value() || !other.has_value() || one->scalar_type() == other->scalar_type(), a.op, ": ",
                     names, " are ", one->scalar_type(), " and ", other->scalar_type(), "; they are the same.");
}

}  // namespace

void check_norm(const NormArguments& a) {
    cpu_type(a.x, a.op);
    const auto depth = static_cast<int64_t>(a.depth());
    const bool fits = depth >= 1 && depth <= a.x.dim() && a.x.sym_sizes().slice(a.x.dim() - depth) == Shape(a.shape);
    TORCH_CHECK_VALUE(fits, a.op, ": normalized_shape ", Shape(a.shape),
                      " are not the last dimensions of x, whose shape is ", a.x.sym_sizes(), ".");
    check_affine(a, a.weight, "weight");
    check_affine(a, a.bias, "bias");
    check_affine(a, a.x_bias, "x_bias");
    TORCH_CHECK_TYPE(!a.weight.has_value() || !a.bias.has_value() || a.weight->scalar_type() == a.bias->scalar_type(),
                     a.op, ": weight is ", a.weight->scalar_type(), " and bias ", a.bias->scalar_type(),
                     "; they are the same.");
    const OptionalTensor& affine = a.weight.has_value() ? a.weight : a.bias;
    check_same(a, affine, a.x_bias, "the norm's weights and x_bias");
    if (a.residual.has_value()) {
        check_same_shape(a.op, *a.residual, "residual", a.x);
        check_device(a.op, *a.residual, "residual", a.x);
        TORCH_CHECK_TYPE(a.residual->scalar_type() == a.x.scalar_type() ||
                             narrows(a.residual->scalar_type(), a.x.scalar_type()),
                         a.op, ": residual is ", a.residual->scalar_type(), " and x ", a.x.scalar_type(),
                         "; they are the same, or residual is Float and x Half or BFloat16.");
    }
    TORCH_CHECK_TYPE(a.y_type() == a.x.scalar_type() || narrows(a.x.scalar_type(), a.y_type()), a.op,
                     ": out_dtype is ", a.y_type(), " and x ", a.x.scalar_type(),
                     "; they are the same, or x is Float and out_dtype Half or BFloat16.");
    check_probability(a.op, a.p);
    TORCH_CHECK_VALUE(a.p == 0 || a.seed.has_value(), a.op, ": p is ", a.p, " and there is no seed.");
    if (a.seed.has_value()) check_seed(a.op, *a.seed, a.x);
}

void check_norm_gradient(const OptionalTensor& grad, const Tensor& x, at::ScalarType type, const char* name, bool may_narrow) {
    if (!grad.has_value()) return;
    check_same_shape("norm_backward", *grad, name, x);
    TORCH_CHECK_TYPE(grad->scalar_type() == type || (may_narrow && narrows(type, grad->scalar_type())), "norm_backward: ", name,
                     " is ", grad->scalar_type(), " and what was normalized ", type, ".");
}

Norm as_rows(const NormArguments& a) {
    int64_t rows = 1, n = 1;
    const int64_t split = a.x.dim() - static_cast<int64_t>(a.depth());
    for (int64_t i = 0; i < a.x.dim(); ++i) (i < split ? rows : n) *= a.x.size(i);
    return {a.x.contiguous(), contiguous(a.residual), contiguous(a.x_bias), contiguous(a.weight), contiguous(a.bias),
            a.seed,           a.eps,                  a.p,                  a.centred,            rows,
            n};
}

}  // namespace fuseline
