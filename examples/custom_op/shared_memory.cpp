// The kernels of shared_memory.cu as operators, without gradients; on a CPU torch's own functions.

#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <fuseline_extension.h>
#include <torch/library.h>

using at::Tensor;

#ifdef FUSELINE_WITH_CUDA
extern "C" int example_relu_shared(const float* x, float* y, int64_t count, void* stream);
extern "C" int example_transpose(const float* x, float* y, int rows, int columns, int shared, void* stream);
#endif

namespace {

constexpr int64_t kMostRows = 65535 * 32;  // of tiles in a grid's second dimension

void check(const Tensor& x, int64_t dimensions) {
    TORCH_CHECK_VALUE(x.dim() == dimensions, "shared_example takes ", dimensions, " dimensions, not ", x.sizes());
    TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, "shared_example takes float32, not ", x.scalar_type());
}

Tensor relu_cpu(const Tensor& x) {
    check(x, 1);
    return at::clamp_min(x.contiguous(), 0);
}

Tensor transpose_cpu(const Tensor& x, bool) {
    check(x, 2);
    return x.t().clone(at::MemoryFormat::Contiguous);
}

#ifdef FUSELINE_WITH_CUDA
Tensor relu_cuda(const Tensor& x) {
    check(x, 1);
    const c10::DeviceGuard guard(x.device());
    const Tensor in = x.contiguous();
    Tensor y = at::empty(in.sizes(), in.options());
    if (in.numel() == 0) return y;
    const int code = example_relu_shared(in.const_data_ptr<float>(), y.mutable_data_ptr<float>(), in.numel(),
                                         fuseline::current_stream(x));
    TORCH_CHECK(code == 0, "shared_example: the launch failed with CUDA error ", code);
    return y;
}

Tensor transpose_cuda(const Tensor& x, bool shared) {
    check(x, 2);
    TORCH_CHECK_VALUE(x.size(0) <= kMostRows && x.size(1) < INT32_MAX, "shared_example: too large: ", x.sizes());
    const c10::DeviceGuard guard(x.device());
    const Tensor in = x.contiguous();
    Tensor y = at::empty({x.size(1), x.size(0)}, in.options());
    if (in.numel() == 0) return y;
    const int code = example_transpose(in.const_data_ptr<float>(), y.mutable_data_ptr<float>(),
                                       static_cast<int>(x.size(0)), static_cast<int>(x.size(1)), shared,
                                       fuseline::current_stream(x));
    TORCH_CHECK(code == 0, "shared_example: the launch failed with CUDA error ", code);
    return y;
}
#endif

}  // namespace

TORCH_LIBRARY(shared_example, m) {
    m.def("relu(Tensor x) -> Tensor");
    m.def("transpose(Tensor x, bool shared) -> Tensor");
}

TORCH_LIBRARY_IMPL(shared_example, CPU, m) {
    m.impl("relu", relu_cpu);
    m.impl("transpose", transpose_cpu);
}

#ifdef FUSELINE_WITH_CUDA
TORCH_LIBRARY_IMPL(shared_example, CUDA, m) {
    m.impl("relu", relu_cuda);
    m.impl("transpose", transpose_cuda);
}
#endif
