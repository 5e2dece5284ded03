// What the ops' files share: the loaded kernels, streams, dtypes, rows on the CPU, and the refusal of second
// derivatives. It includes no more of ATen than it needs: the full headers take half a minute a file.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <optional>
#include <string>

#include "cpu/rows.h"
#include "fuseline_extension.h"
#include "fuseline_kernels.h"

namespace fuseline {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A function of libfuseline_kernels. Throws, naming what to do, if Python has not loaded it.
void* kernel_symbol(const char* name);
#define FUSELINE_KERNEL(name) reinterpret_cast<decltype(&::name)>(::fuseline::kernel_symbol(#name))

// Throws if a launch answered anything but 0.
void check_launch(int code, const char* op);

int kernel_dtype(const Tensor& x, const char* op);
cpu::Type cpu_type(const Tensor& x, const char* op);

// float, but double for double: what statistics and sums are kept in.
inline at::ScalarType accumulator_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

inline bool wants_grad(const Tensor& x) { return x.defined() && x.requires_grad(); }
inline bool wants_grad(const std::optional<Tensor>& x) { return x.has_value() && wants_grad(*x); }

inline const void* data_or_null(const std::optional<Tensor>& x) { return x.has_value() ? x->const_data_ptr() : nullptr; }

inline std::optional<Tensor> contiguous(const std::optional<Tensor>& x) {
    return x.has_value() ? std::optional<Tensor>(x->contiguous()) : std::nullopt;
}

// Without gaps, and at a multiple of 16 bytes.
inline Tensor vectors(const Tensor& x) {
    const Tensor dense = x.contiguous();
    return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

inline std::optional<Tensor> vectors(const std::optional<Tensor>& x) {
    return x.has_value() ? std::optional<Tensor>(vectors(*x)) : std::nullopt;
}

// Calls work(begin, end, scratch) over `count` items on torch's CPU threads, each with room for its own scratch.
template <typename Work>
void parallel_rows(int64_t count, int64_t grain, int64_t scratch_elements, const Work& work) {
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
        const std::unique_ptr<double[]> scratch(new double[scratch_elements]);
        work(begin, end, scratch.get());
    });
}

inline int64_t row_grain(int64_t n) {
    constexpr int64_t elements = 16384;  // under it a second thread costs more than it brings
    return std::max<int64_t>(1, elements / std::max<int64_t>(1, n));
}

// `result` of a backward op as it is, with a node that refuses to be differentiated if any input could be.
struct NoSecondDerivative : torch::autograd::Function<NoSecondDerivative> {
    static Tensor forward(AutogradContext* ctx, const Tensor& result, const Tensor& grad_out, const Tensor& saved,
                          const std::string& op);
    static variable_list backward(AutogradContext* ctx, const variable_list& grads);
};

// For a backward pass that is itself recorded: `kept`, made by the running node's forward pass, as a tensor that depends
// on all the node was given.
Tensor of_running_node(const Tensor& kept);

}  // namespace fuseline
