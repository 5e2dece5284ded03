// The probes as operators, and their counterparts for a processor. What they are for is in probes.cu.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <fuseline_extension.h>
#include <torch/library.h>

#include <chrono>
#include <cmath>
#include <cstdint>

#ifdef FUSELINE_WITH_CUDA
extern "C" int probe_chase(const int64_t*, int64_t, int64_t, int64_t, int, int64_t*, void*);
extern "C" int probe_launch(int64_t, void*);
extern "C" int probe_read(const void*, int64_t, void*, void*);
extern "C" int probe_elementwise(const void*, void*, int64_t, int, void*);
#endif

namespace {

void check_chain(const at::Tensor& chain, const at::Tensor& result) {
    TORCH_CHECK_TYPE(chain.scalar_type() == at::kLong && result.scalar_type() == at::kLong,
                     "chase: chain and result are int64, but they are ", chain.scalar_type(), " and ",
                     result.scalar_type());
    TORCH_CHECK_VALUE(result.numel() == 3 && chain.is_contiguous(), "chase: result has 3 elements, chain no gaps");
}

void check_elementwise(const at::Tensor& x, int64_t kind) {
    TORCH_CHECK_VALUE(kind >= 0 && kind <= 2, "elementwise: there is no kind ", kind);
    const auto wanted = kind == 1 ? at::kChar : at::kFloat;
    TORCH_CHECK_TYPE(x.scalar_type() == wanted, "elementwise: kind ", kind, " takes ", wanted, ", not ",
                     x.scalar_type());
    TORCH_CHECK_VALUE(x.is_contiguous() && x.nbytes() % 16 == 0, "elementwise: x has no gaps and whole 16 bytes");
}

void chase_cpu(const at::Tensor& chain, int64_t steps, int64_t lead, int64_t /*space*/, at::Tensor& result) {
    check_chain(chain, result);
    auto at = reinterpret_cast<int64_t>(chain.const_data_ptr<int64_t>());
    for (int64_t i = 0; i < lead; ++i) at = *reinterpret_cast<const int64_t*>(at);
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < steps; ++i) at = *reinterpret_cast<const int64_t*>(at);
    const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - begin;
    auto* out = result.mutable_data_ptr<int64_t>();
    out[0] = at;  // the loop's result is used, so that it is run
    out[1] = 0;  // a processor's clock is not read
    out[2] = taken.count();
}

template <typename T, typename Function>
void each(const at::Tensor& x, at::Tensor& y, Function f) {
    const T* from = x.const_data_ptr<T>();
    T* to = y.mutable_data_ptr<T>();
    const int64_t count = x.numel();
#pragma omp parallel for
    for (int64_t i = 0; i < count; ++i) to[i] = f(from[i]);
}

at::Tensor elementwise_cpu(const at::Tensor& x, int64_t kind) {
    check_elementwise(x, kind);
    at::Tensor y = at::empty_like(x);
    if (kind == 0) each<float>(x, y, [](float v) { return v < 0.0f ? 0.0f : v; });
    if (kind == 1) each<int8_t>(x, y, [](int8_t v) { return v < 0 ? int8_t(0) : v; });
    if (kind == 2) each<float>(x, y, [](float v) { return std::sin(std::sin(std::sin(std::sin(v)))); });
    return y;
}

#ifdef FUSELINE_WITH_CUDA

void check_launch(int error) { TORCH_CHECK(error == 0, "a probe failed with CUDA error ", error); }

void chase_cuda(const at::Tensor& chain, int64_t steps, int64_t lead, int64_t space, at::Tensor& result) {
    check_chain(chain, result);
    check_launch(probe_chase(chain.const_data_ptr<int64_t>(), chain.numel(), steps, lead, static_cast<int>(space),
                             result.mutable_data_ptr<int64_t>(), fuseline::current_stream(chain)));
}

void launch_cuda(const at::Tensor& on, int64_t count) { check_launch(probe_launch(count, fuseline::current_stream(on))); }

void read_cuda(const at::Tensor& x, at::Tensor& out) {
    TORCH_CHECK_VALUE(x.is_contiguous() && x.nbytes() % 16 == 0, "read: x has no gaps and whole 16 bytes");
    check_launch(probe_read(x.const_data_ptr(), static_cast<int64_t>(x.nbytes()), out.mutable_data_ptr(),
                            fuseline::current_stream(x)));
}

at::Tensor elementwise_cuda(const at::Tensor& x, int64_t kind) {
    check_elementwise(x, kind);
    at::Tensor y = at::empty_like(x);
    check_launch(probe_elementwise(x.const_data_ptr(), y.mutable_data_ptr(), static_cast<int64_t>(x.nbytes()),
                                   static_cast<int>(kind), fuseline::current_stream(x)));
    return y;
}

#endif

}  // namespace

TORCH_LIBRARY(fuseline_probes, m) {
    m.def("chase(Tensor chain, int steps, int lead, int space, Tensor(a!) result) -> ()");
    m.def("launch(Tensor on, int count) -> ()");
    m.def("read(Tensor x, Tensor(a!) out) -> ()");
    m.def("elementwise(Tensor x, int kind) -> Tensor");
}

TORCH_LIBRARY_IMPL(fuseline_probes, CPU, m) {
    m.impl("chase", chase_cpu);
    m.impl("elementwise", elementwise_cpu);
}

#ifdef FUSELINE_WITH_CUDA
TORCH_LIBRARY_IMPL(fuseline_probes, CUDA, m) {
    m.impl("chase", chase_cuda);
    m.impl("launch", launch_cuda);
    m.impl("read", read_cuda);
    m.impl("elementwise", elementwise_cuda);
}
#endif
