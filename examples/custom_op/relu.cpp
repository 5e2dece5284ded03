// ReLU as an operator of one's own: schema, CPU, CUDA, Meta (shapes only, for the compiler) and Autograd.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <fuseline_extension.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

#ifdef FUSELINE_WITH_CUDA
extern "C" int example_relu(const float* x, float* y, int64_t count, void* stream);
extern "C" int example_relu_backward(const float* grad_y, const float* y, float* grad_x, int64_t count, void* stream);
#endif

namespace {

// The result is contiguous whatever x is, here as on CUDA and in the Meta kernel: the compiler relies on it.
Tensor relu_cpu(const Tensor& x) { return at::clamp_min(x.contiguous(), 0); }

Tensor relu_backward_cpu(const Tensor& grad_y, const Tensor& y) {
    return at::where(y.contiguous() > 0, grad_y.contiguous(), at::zeros({}, grad_y.options()));
}

#ifdef FUSELINE_WITH_CUDA
void check(const Tensor& x, int code) {
    TORCH_CHECK(code == 0, "relu_example: the launch failed with CUDA error ", code, " for ", x.sizes());
}

Tensor relu_cuda(const Tensor& x) {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, "relu_example takes float32 on CUDA, not ", x.scalar_type());
    const c10::DeviceGuard guard(x.device());
    const Tensor in = x.contiguous();
    Tensor y = at::empty(in.sizes(), in.options());
    if (in.numel() > 0) {
        check(x, example_relu(in.const_data_ptr<float>(), y.mutable_data_ptr<float>(), in.numel(),
                              fuseline::current_stream(x)));
    }
    return y;
}

Tensor relu_backward_cuda(const Tensor& grad_y, const Tensor& y) {
    const c10::DeviceGuard guard(y.device());
    const Tensor g = grad_y.contiguous(), out = y.contiguous();  // a gradient may arrive with stride 0
    Tensor grad_x = at::empty(out.sizes(), out.options());
    if (out.numel() > 0) {
        check(y, example_relu_backward(g.const_data_ptr<float>(), out.const_data_ptr<float>(),
                                       grad_x.mutable_data_ptr<float>(), out.numel(), fuseline::current_stream(y)));
    }
    return grad_x;
}
#endif

// sym_sizes, not sizes: a compiled model then has one graph for all shapes.
Tensor relu_meta(const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); }

Tensor relu_backward_meta(const Tensor&, const Tensor& y) { return at::empty_symint(y.sym_sizes(), y.options()); }

Tensor call(const char* name, const Tensor& x) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Tensor(const Tensor&)>().call(x);
}

struct Relu : torch::autograd::Function<Relu> {
    static Tensor forward(AutogradContext* ctx, const Tensor& x) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const Tensor y = call("relu_example::relu", x);
        ctx->save_for_backward({y});
        return y;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        static const auto op = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("relu_example::relu_backward", "")
                                   .typed<Tensor(const Tensor&, const Tensor&)>();
        return {op.call(grads[0], ctx->get_saved_variables()[0])};
    }
};

Tensor relu_autograd(const Tensor& x) { return Relu::apply(x); }

}  // namespace

TORCH_LIBRARY(relu_example, m) {
    m.def("relu(Tensor x) -> Tensor");
    m.def("relu_backward(Tensor grad_y, Tensor y) -> Tensor");
}

TORCH_LIBRARY_IMPL(relu_example, CPU, m) {
    m.impl("relu", relu_cpu);
    m.impl("relu_backward", relu_backward_cpu);
}

#ifdef FUSELINE_WITH_CUDA
TORCH_LIBRARY_IMPL(relu_example, CUDA, m) {
    m.impl("relu", relu_cuda);
    m.impl("relu_backward", relu_backward_cuda);
}
#endif

TORCH_LIBRARY_IMPL(relu_example, Meta, m) {
    m.impl("relu", relu_meta);
    m.impl("relu_backward", relu_backward_meta);
}

TORCH_LIBRARY_IMPL(relu_example, Autograd, m) { m.impl("relu", relu_autograd); }
