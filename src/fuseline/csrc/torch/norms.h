// The norms' family: what an op of it computes, and the two devices that compute it.

#pragma once

#include "fuseline_torch.h"

namespace fuseline {

using OptionalTensor = std::optional<Tensor>;

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

// For the backward: `normalized.sum` (x itself where nothing was added), mean and rstd are given.
struct NormGradients {
    OptionalTensor grad_y, grad_sum;             // incoming
    Tensor residual, x, weight, bias, x_bias;    // filled where defined; `residual` is x's too where nothing is dropped
};

void norm_forward_cpu(const Norm& norm, const Normalized& result);
void norm_forward_cuda(const Norm& norm, const Normalized& result);
void norm_backward_cpu(const Norm& norm, const Normalized& saved, const NormGradients& grads);
void norm_backward_cuda(const Norm& norm, const Normalized& saved, const NormGradients& grads);

}  // namespace fuseline
