// GELU between two linear layers in fp8, and its gradient: what the next product reads is made in the same pass.
//
//   forward:  y = gelu(x + bias), and y's rows in fp8
//   backward: grad_x = grad_out * gelu'(x + bias), the rows of grad_x * columns in fp8, and the sum of grad_x over rows
//
// Moves: forward x read once, y and a byte an element written once; backward grad_out and x read once, grad_x and a byte
// an element written once, and a row of partial sums a block. Does: 15 to 45 operations an element, two of them on the
// special function units. Limit: HBM bandwidth.
//
// Threads: blocks stay, and take every so-manieth row. A thread has kStep elements of each, in registers, so that the
// largest of the row is known before it is written as fp8, and keeps the sums of its columns. It fetches the next row
// before the block meets over this one.

#include <cuda_fp8.h>

#include "device/activation.cuh"
#include "device/fp8.cuh"
#include "device/partials.cuh"
#include "fuseline_fp8.h"

namespace fuseline {
namespace {

constexpr int kMostThreadsHere = 512;  // of a block: 128 registers each
constexpr int kThreadsOfProcessor = 768;

struct GeluFp8 {
  const void* grad_out;  // null in the forward
  const void* x;
  const float* bias;     // null: none
  const float* columns;  // of the backward
  void* wide;            // y, or grad_x
  void* narrow;
  float* scales;
  float* partials;       // [blocks, n]; null if no sums are wanted
  int64_t rows, n;
};

// kStep elements of a row as they came.
template <class T>
struct Raw {
  static constexpr int kLoads = kFp8Step / kVector<T>;
  uint4 words[kLoads];

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = load_once(from + i * kVector<T>);
  }
  __device__ __forceinline__ void unpacked(float (&values)[kFp8Step]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float some[kVector<T>];
      unpack<T>(words[i], some);
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) values[i * kVector<T> + j] = some[j];
    }
  }
};

// Rounded to T, which `to` gets.
template <class T>
__device__ __forceinline__ void store_rounded(T* to, float (&values)[kFp8Step]) {
#pragma unroll
  for (int i = 0; i < Raw<T>::kLoads; ++i) {
    float some[kVector<T>];
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) some[j] = values[i * kVector<T> + j];
    const uint4 packed = pack<T>(some);
    *reinterpret_cast<uint4*>(to + i * kVector<T>) = packed;
    unpack<T>(packed, some);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) values[i * kVector<T> + j] = some[j];
  }
}

template <class Activation, class T, __nv_fp8_interpretation_t kFormat, bool kBackward>
__global__ void __launch_bounds__(kMostThreadsHere) gelu_fp8(const GeluFp8 a) {
  const int64_t first = int64_t(threadIdx.x) * kFp8Step;
  const bool mine = first < a.n;
  const T* const x = static_cast<const T*>(a.x) + first;
  const T* const grad_out = static_cast<const T*>(a.grad_out) + first;
  float bias[kFp8Step] = {}, sums[kBackward ? kFp8Step : 1] = {};
  let_next_start();
  wait_for_earlier();
  if (mine && a.bias) {
#pragma unroll
    for (int i = 0; i < kFp8Step; ++i) bias[i] = __ldg(a.bias + first + i);
  }
  Raw<T> next, next_grad;
  const auto fetch = [&](int64_t row) {
    if (!mine || row >= a.rows) return;
    next.load(x + row * a.n);
    if constexpr (kBackward) next_grad.load(grad_out + row * a.n);
  };
  fetch(blockIdx.x);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    float values[kFp8Step] = {};
    if (mine) {
      next.unpacked(values);
      if constexpr (kBackward) {
        float grads[kFp8Step];
        next_grad.unpacked(grads);
#pragma unroll
        for (int i = 0; i < kFp8Step; ++i) values[i] = grads[i] * Activation::both(values[i] + bias[i]).y;
      } else {
#pragma unroll
        for (int i = 0; i < kFp8Step; ++i) values[i] = Activation::value(values[i] + bias[i]);
      }
    }
    fetch(row + gridDim.x);
    if (mine) {
      store_rounded<T>(static_cast<T*>(a.wide) + row * a.n + first, values);
      if constexpr (kBackward) {
#pragma unroll
        for (int i = 0; i < kFp8Step; ++i) {
          sums[i] += values[i];
          values[i] *= __ldg(a.columns + first + i);
        }
      }
    }
    const float scale = fp8_scale<kFormat>(most_of_block(most_of(values), turn));
    if (threadIdx.x == 0) a.scales[row] = scale;
    if (mine) store_fp8<kFormat>(static_cast<uint8_t*>(a.narrow) + row * a.n + first, values, __frcp_rn(scale));
  }
  if constexpr (kBackward) {
    if (!mine || !a.partials) return;
    float4* const to = reinterpret_cast<float4*>(a.partials + blockIdx.x * a.n + first);
#pragma unroll
    for (int i = 0; i < kFp8Step / 4; ++i) to[i] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }
}

int threads_of(int64_t n) { return int(divide_up(n, kFp8Step * kWarp) * kWarp); }

int64_t blocks_of(int64_t rows, int64_t n, const Device& device) {
  const int64_t of_processor = std::max<int64_t>(1, kThreadsOfProcessor / threads_of(n));
  return std::min(rows, of_processor * device.processors);
}

template <bool kBackward>
int run(GeluFp8 a, void* grad_bias, int approximate, int dtype, int format, void* stream) {
  if (a.rows < 0 || a.n < 0) return FUSELINE_BAD_SIZE;
  if (a.rows == 0) return 0;
  if (a.n == 0 || a.n % kFp8Step || a.n > int64_t(kMostThreadsHere) * kFp8Step) return FUSELINE_UNSUPPORTED;
  for (const void* at : {a.x, static_cast<const void*>(a.wide), static_cast<const void*>(a.narrow), a.grad_out}) {
    if (offset_in_vector(at)) return FUSELINE_UNSUPPORTED;
  }
  if (dtype != FUSELINE_FLOAT16 && dtype != FUSELINE_BFLOAT16) return FUSELINE_UNSUPPORTED;
  if (approximate != FUSELINE_GELU_TANH && approximate != FUSELINE_GELU_ERF) return FUSELINE_UNSUPPORTED;
  if (format != FUSELINE_E4M3 && !(kBackward && format == FUSELINE_E5M2)) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  const int64_t blocks = blocks_of(a.rows, a.n, device);
  const auto launched = [&](auto type, auto activation) {
    using T = decltype(type);
    using Activation = decltype(activation);
    const auto kernel = format == FUSELINE_E4M3 ? gelu_fp8<Activation, T, __NV_E4M3, kBackward>
                                                : gelu_fp8<Activation, T, kBackward ? __NV_E5M2 : __NV_E4M3, kBackward>;
    const int code = launch(kernel, a, blocks, dim3(unsigned(threads_of(a.n))), 0, 1, stream, device.clusters);
    if (code || !a.partials) return code;
    return run_add_partials<float>(a.partials, blocks, a.n, grad_bias, true, device, stream);
  };
  const auto by_type = [&](auto type) {
    using T = decltype(type);
    return approximate == FUSELINE_GELU_TANH ? launched(type, GeluTanh<T>{}) : launched(type, GeluErf<T>{});
  };
  return dtype == FUSELINE_FLOAT16 ? by_type(__half{}) : by_type(__nv_bfloat16{});
}

}  // namespace
}  // namespace fuseline

int fuseline_gelu_fp8_forward(const void* x, const float* bias, void* y, void* y8, float* scales, int64_t rows, int64_t n,
                              int approximate, int dtype, void* stream) {
  using namespace fuseline;
  return run<false>({nullptr, x, bias, nullptr, y, y8, scales, nullptr, rows, n}, nullptr, approximate, dtype, FUSELINE_E4M3,
                    stream);
}

int64_t fuseline_gelu_fp8_backward_blocks(int64_t rows, int64_t n) {
  using namespace fuseline;
  Device device;
  if (rows <= 0 || n <= 0 || n > int64_t(kMostThreadsHere) * kFp8Step || current_device(device) != cudaSuccess) return 0;
  return blocks_of(rows, n, device);
}

int fuseline_gelu_fp8_backward(const void* grad_out, const void* x, const float* bias, const float* columns, void* grad_x,
                               void* grad_x8, float* scales, float* grad_bias, float* partials, int64_t rows, int64_t n,
                               int approximate, int dtype, int format, void* stream) {
  using namespace fuseline;
  if (rows == 0 && grad_bias) {
    return int(cudaMemsetAsync(grad_bias, 0, size_t(n) * sizeof(float), static_cast<cudaStream_t>(stream)));
  }
  return run<true>({grad_out, x, bias, columns, grad_x, grad_x8, scales, grad_bias ? partials : nullptr, rows, n}, grad_bias,
                   approximate, dtype, format, stream);
}
