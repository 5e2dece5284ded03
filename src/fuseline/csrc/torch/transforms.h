// What an op does under forward-mode differentiation and torch.func (jvp, grad, vjp, jacrev, hessian), for which its
// kernels have no rules: the reference, whose torch operators have them all, takes its place, or the op refuses by name.
//
// Python registers `<op>_reference` for each op that has a reference of the same arguments (ops/transforms.py).

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "fuseline_torch.h"

namespace fuseline {

// Whether forward-mode differentiation is under way in this process, so that a tensor may have a tangent at all: one
// question a call, where each tensor would be asked under a lock of its own.
bool forward_mode_is_on();

inline bool is_transformed(const Tensor& x, bool forward_mode) {
    if (!x.defined()) return false;
    if (x.key_set().has(c10::DispatchKey::FuncTorchGradWrapper)) return true;
    return forward_mode && x._fw_grad(/*level=*/0).defined();
}
inline bool is_transformed(const std::optional<Tensor>& x, bool forward_mode) {
    return x.has_value() && is_transformed(*x, forward_mode);
}
template <typename Other>
bool is_transformed(const Other&, bool) {
    return false;
}

// The op of that name that runs the reference. Throws, naming the op and what to do, where there is none.
c10::OperatorHandle reference_of(const char* name);

template <auto kernel>
struct Transformed;

template <class Result, class... Given, Result (*kernel)(Given...)>
struct Transformed<kernel> {
    static inline const char* name = nullptr;

    static Result call(Given... given) {
        const bool forward_mode = forward_mode_is_on();
        if ((is_transformed(given, forward_mode) || ...)) {
            return reference_of(name).template typed<Result(Given...)>().call(given...);
        }
        return kernel(given...);
    }
};

// Registers `kernel`, an op's autograd, for what is not transformed.
template <auto kernel>
void impl_autograd(torch::Library& m, const char* name) {
    Transformed<kernel>::name = name;
    m.impl(name, Transformed<kernel>::call);
}

}  // namespace fuseline
