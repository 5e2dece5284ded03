// ReLU and its gradient, one thread an element. No torch header: it compiles in seconds, and anyone with pointers
// can call it.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

__global__ void relu(const float* x, float* y, int64_t count) {
    const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (i < count) y[i] = x[i] < 0.0f ? 0.0f : x[i];  // NaN stays NaN
}

__global__ void relu_backward(const float* grad_y, const float* y, float* grad_x, int64_t count) {
    const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (i < count) grad_x[i] = y[i] > 0.0f ? grad_y[i] : 0.0f;
}

constexpr int kThreads = 256;

unsigned blocks(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

}  // namespace

extern "C" int example_relu(const float* x, float* y, int64_t count, void* stream) {
    relu<<<blocks(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(x, y, count);
    return cudaGetLastError();
}

extern "C" int example_relu_backward(const float* grad_y, const float* y, float* grad_x, int64_t count, void* stream) {
    relu_backward<<<blocks(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(grad_y, y, grad_x, count);
    return cudaGetLastError();
}
