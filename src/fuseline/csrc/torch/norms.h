// The norms' family: what an op of it computes, and the two devices that compute it.

#pragma once

#include "op.h"

namespace fuseline {

using Shape = c10::SymIntArrayRef;

// What callers pass, whatever the op.
struct NormArguments {
    const char* op;
    const Tensor& x;
    OptionalTensor residual, x_bias, weight, bias, seed;
    c10::SymDimVector shape;  // normalized over: the last dimensions of x
    double eps, p;
    bool centred;
    std::optional<at::ScalarType> out_dtype = std::nullopt;
    bool returns_x = false;  // as well as y, so that one backward adds both gradients

    size_t depth() const { return shape.size(); }
    at::ScalarType y_type() const { return out_dtype.value_or(x.scalar_type()); }
};

// Throws where they do not fit each other.
void check_norm(const NormArguments& a);

// The same of a gradient and what was normalized, of x's shape and of `type`; `may_narrow`: it may have 16 bits of a float32.
void check_norm_gradient(const OptionalTensor& grad, const Tensor& x, at::ScalarType type, const char* name, bool may_narrow);

// What is normalized is x, or with a residual the sum residual + dropout(x + x_bias). Tensors are contiguous.
struct Norm {
    Tensor x;
    OptionalTensor residual, x_bias, weight, bias, seed;
    double eps, p;
    bool centred;  // a layer norm; otherwise an RMS norm
    int64_t rows, n;
};

// Filled where defined.
struct Normalized {
    Tensor y, sum, mean, rstd;
};

// For the backward: `normalized.sum` (x itself where nothing was added), mean and rstd are given. Or, in place of the first two,
// y of a norm without weight and bias, of 16 bits where the sum is float32.
struct NormGradients {
    OptionalTensor grad_y, grad_sum;             // incoming
    Tensor residual, x, weight, bias, x_bias;    // filled where defined; `residual` is x's too where nothing is dropped
};

// The tensors of a call, made contiguous: x as [rows, n], the dimensions before `shape`, and the product of `shape`.
Norm as_rows(const NormArguments& a);

void norm_forward_cpu(const Norm& norm, const Normalized& result);
void norm_forward_cuda(const Norm& norm, const Normalized& result);
void norm_backward_cpu(const Norm& norm, const Normalized& saved, const NormGradients& grads);
void norm_backward_cuda(const Norm& norm, const Normalized& saved, const NormGradients& grads);

}  // namespace fuseline
