// What the ops' files have alike: an op as others call it, its kernels on each device, the gradients that refuse to be
// differentiated again, and the checks that every op makes.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>

#include "fuseline_torch.h"
#include "transforms.h"

namespace fuseline {

using OptionalTensor = std::optional<Tensor>;

// ---- calls ----

// The name of an op, as an argument of templates.
template <size_t N>
struct OpName {
    char text[N];
    consteval OpName(const char (&given)[N]) { std::copy_n(given, N, text); }
};

// An op as others call it; its signature is that of its kernels: constexpr Op<"gelu", decltype(gelu_meta)> gelu_op;
template <OpName name, class Signature>
struct Op;

template <OpName name, class Result, class... Given>
struct Op<name, Result(Given...)> {
    Result operator()(Given... given) const {
        static const auto op = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow((std::string("fuseline::") + name.text).c_str(), "")
                                   .template typed<Result(Given...)>();
        return op.call(std::forward<Given>(given)...);
    }
    // For the kernels of autograd: nothing is recorded.
    Result below_autograd(Given... given) const {
        const at::AutoDispatchBelowADInplaceOrView guard;
        return (*this)(std::forward<Given>(given)...);
    }
};

// Inside an op's kernel dtypes are what they are: nothing is cast because the caller is under autocast.
struct WithoutAutocast {
    c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// ---- autograd ----

// Whether a gradient of any of them will be wanted.
template <class... Tensors>
bool tracked(const Tensors&... given) {
    return at::GradMode::is_enabled() && (wants_grad(given) || ...);
}

// A tensor that a node has saved: undefined where there was none.
inline OptionalTensor optional(const Tensor& saved) { return saved.defined() ? OptionalTensor(saved) : std::nullopt; }

inline void add_tracked(variable_list& to, const Tensor& given) {
    if (wants_grad(given)) to.push_back(given);
}
inline void add_tracked(variable_list& to, const OptionalTensor& given) {
    if (wants_grad(given)) to.push_back(*given);
}
template <class Other>
void add_tracked(variable_list&, const Other&) {}

// What a backward op has made, refusing to be differentiated by any of `given`, in the name of `op`.
inline Tensor refused(const Tensor& made, const variable_list& given, const char* op) {
    Tensor result = made;
    for (const Tensor& each : given) {
        if (result.defined()) result = NoSecondDerivative::apply(result, each, each, std::string(op));
    }
    return result;
}
template <class... Tensors>
std::tuple<Tensors...> refused(const std::tuple<Tensors...>& made, const variable_list& given, const char* op) {
    return std::apply([&](const auto&... each) { return std::tuple<Tensors...>(refused(each, given, op)...); }, made);
}

template <OpName backward, OpName op, class Signature>
struct WithoutSecondDerivative;

template <OpName backward, OpName op, class Result, class... Given>
struct WithoutSecondDerivative<backward, op, Result(Given...)> {
    static Result call(Given... given) {
        variable_list all;
        if (at::GradMode::is_enabled()) (add_tracked(all, given), ...);
        const Result made = Op<backward, Result(Given...)>().below_autograd(given...);
        return all.empty() ? made : refused(made, all, op.text);
    }
};

// ---- registrations ----

// Defines an op with its kernels on the CPU, on CUDA and for tensors that have no data.
template <class Cpu, class Cuda, class Meta>
void define(torch::Library& m, const char* schema, Cpu cpu, Cuda cuda, Meta meta) {
    const std::string name(schema, std::strchr(schema, '('));
    m.def(schema, {at::Tag::pt2_compliant_tag});
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CPU, cpu));
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CUDA, cuda));
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Meta, meta));
}

// One that kernels compute on CUDA alone.
template <class Cuda, class Meta>
void define_on_cuda(torch::Library& m, const char* schema, Cuda cuda, Meta meta) {
    const std::string name(schema, std::strchr(schema, '('));
    m.def(schema, {at::Tag::pt2_compliant_tag});
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CUDA, cuda));
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Meta, meta));
}

// Its kernel of autograd; `name` outlives the library.
template <auto kernel>
void differentiate(torch::Library& m, const char* name) {
    Transformed<kernel>::name = name;
    m.impl(name, torch::dispatch(c10::DispatchKey::Autograd, Transformed<kernel>::call));
}

// For the backward op of `op`, with the signature of one of its kernels.
template <OpName backward, OpName op, auto kernel>
void refuse_second_derivative(torch::Library& m) {
    static constexpr OpName name = backward;
    differentiate<WithoutSecondDerivative<backward, op, std::remove_pointer_t<decltype(kernel)>>::call>(m, name.text);
}

// ---- checks ----

void check_device(const char* op, const Tensor& given, const char* name, const Tensor& x, const char* x_name = "x");
void check_same_shape(const char* op, const Tensor& given, const char* name, const Tensor& x, const char* x_name = "x");
void check_same_dtype(const char* op, const Tensor& given, const char* name, const Tensor& x, const char* x_name = "x");
// For parameters that are multiplied in x's dtype.
void check_same_dtype_or_float(const char* op, const Tensor& given, const char* name, const Tensor& x, const char* x_name = "x");
void check_probability(const char* op, double p);
// One int64 on x's device.
void check_seed(const char* op, const Tensor& seed, const Tensor& x);

// ---- tensors ----

// Contiguous, at a multiple of 16 bytes.
Tensor aligned(const Tensor& x);

// x as rows of its last dimension.
Tensor rows_of(const Tensor& x);

}  // namespace fuseline
