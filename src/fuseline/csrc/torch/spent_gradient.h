// When a backward pass may write over a gradient that the forward pass saved.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fuseline {

// Whether somebody records what is done with a tensor, or does it with several at once.
inline bool recorded(const at::Tensor& x) {
    constexpr c10::DispatchKeySet keys{c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::Batched,
                                       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper};
    return x.key_set().has_any(keys);
}

// Whether a saved gradient can be scaled where it is: no other backward pass will ask for it, and nobody records this one.
inline bool spent_here(const at::Tensor& gradient, at::ScalarType type) {
    return gradient.scalar_type() == type && gradient.is_contiguous() && !recorded(gradient) &&
           !c10::impl::dispatch_mode_enabled() && !at::GradMode::is_enabled() &&
           !torch::autograd::get_current_graph_task_keep_graph();
}

}  // namespace fuseline
