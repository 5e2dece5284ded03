// Weights in the dtype that ops multiply in: by copies that were made once for a whole step, where there are such.

#pragma once

#include "fuseline_torch.h"

namespace fuseline {

// `weight` in `type`: itself, its current copy, or a cast of its own.
Tensor lowered(const Tensor& weight, at::ScalarType type);

inline std::optional<Tensor> lowered(const std::optional<Tensor>& weight, at::ScalarType type) {
    return weight.has_value() ? std::optional<Tensor>(lowered(*weight, type)) : std::nullopt;
}

// A weight that a node saved in `lowered`, for its backward pass. `type` is that of the weight itself: a copy of another
// one is not the weight's in autograd's eyes, so that a backward pass that is recorded is told what it depends on.
inline Tensor saved_weight(const Tensor& saved, at::ScalarType type) {
    const bool is_told = !saved.defined() || saved.scalar_type() == type || !at::GradMode::is_enabled();
    return is_told ? saved : of_running_node(saved);
}

}  // namespace fuseline
