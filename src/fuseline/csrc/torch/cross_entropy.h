// The cross-entropy's family: what an op of it is asked, and the two devices that compute it.

#pragma once

#include <string>

#include "op.h"

namespace fuseline::losses {

using OptionalSize = std::optional<c10::SymInt>;

constexpr const char* kName = "cross_entropy";

// What every op of this family takes after its tensors.
struct Options {
    int64_t ignore_index;
    double label_smoothing;
    c10::string_view reduction;
    std::optional<double> soft_cap;
    double z_loss;
    OptionalSize vocab_size;

    double cap() const { return soft_cap.value_or(0.0); }
    bool mean() const { return reduction == "mean"; }
    bool none() const { return reduction == "none"; }
    // Columns that count.
    int64_t columns(const Tensor& logits) const {
        return vocab_size.has_value() ? vocab_size->guard_int(__FILE__, __LINE__) : logits.size(-1);
    }
};

// What the forward returns: the loss reduced, and what its backward starts from; that as far as it is defined.
struct Results {
    Tensor loss;        // rows, or a scalar
    Tensor statistics;  // rows and 2: the largest score, and the sum of the exponentials against it
    Tensor total;       // of the mean: the divisor
    Tensor grad;        // of the logits, if asked
};

using Forward = void(const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Options& o,
                     Results& r, void* grad);
using Backward = void(const Tensor& grad_out, const Tensor& logits, const Tensor& target, const Tensor& statistics,
                      const Tensor& total, const OptionalTensor& weight, const Options& o, Tensor& grad);

// grad: where the gradient goes, null for nowhere; it may be the logits. For a gradient of the mean `total` is there.
Forward forward_cpu, forward_cuda;
Backward backward_cpu, backward_cuda;

// Multiply the rows of x [..., N] by a scalar, or by one factor each, in place.
void scale_rows_cpu(const Tensor& x, const Tensor& factors);
void scale_rows_cuda(const Tensor& x, const Tensor& factors);

}  // namespace fuseline::losses
