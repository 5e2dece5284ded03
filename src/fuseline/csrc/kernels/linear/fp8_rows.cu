// Rows as e4m3 or e5m2, each with its own scale: what a scaled matrix product takes. Each column may be multiplied by a
// number of its own first, as the gradient of a layer is by the scales of the weight's rows.
//
// Moves: x read once, a byte an element and a scale a row written once. Does: 4 operations an element. Limit: HBM
// bandwidth; for few rows the launch.
//
// Threads: a block has a row. Its threads hold kHeld steps of kStep elements each, so that rows to 16,384 elements are
// read once; what is behind those is read from the L2 again.

#include "device/fp8.cuh"
#include "fuseline_fp8.h"

namespace fuseline {
namespace {

constexpr int kStep = kFp8Step, kHeld = 2;

struct Fp8Rows {
  const void* x;
  const float* columns;  // null: none
  void* y;
  float* scales;
  int64_t stride;  // elements between rows of x
  int steps;       // of a row
};

template <class T, bool kByColumns>
struct Step {
  static constexpr int kLoads = kStep / kVector<T>;
  uint4 raw[kLoads];
  float factors[kByColumns ? kStep : 1];

  __device__ __forceinline__ void load(const T* x, const float* columns, int at) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) raw[i] = load_once(x + int64_t(at) * kStep + i * kVector<T>);
    if constexpr (kByColumns) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) factors[i] = __ldg(columns + at * kStep + i);
    }
  }
  template <class Each>
  __device__ __forceinline__ void for_each(Each&& each) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float values[kVector<T>];
      unpack<T>(raw[i], values);
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) {
        const int at = i * kVector<T> + j;
        if constexpr (kByColumns) values[j] *= factors[at];
        each(at, values[j]);
      }
    }
  }
  __device__ __forceinline__ void most_of(uint32_t& most) const {
    for_each([&](int, float value) { most = max(most, magnitude(value)); });
  }
  template <__nv_fp8_interpretation_t kFormat>
  __device__ __forceinline__ void store(uint8_t* y, int at, float inverse) const {
    float values[kStep];
    for_each([&](int i, float value) { values[i] = value; });
    store_fp8<kFormat>(y + int64_t(at) * kStep, values, inverse);
  }
};

// ---- kernels ----

template <class T, __nv_fp8_interpretation_t kFormat, bool kByColumns>
__global__ void __launch_bounds__(kMostThreads) fp8_rows(const Fp8Rows a) {
  const int64_t row = blockIdx.x;
  const int threads = blockDim.x, behind = int(threadIdx.x) + kHeld * threads;
  const T* const x = static_cast<const T*>(a.x) + row * a.stride;
  uint8_t* const y = static_cast<uint8_t*>(a.y) + row * a.steps * kStep;
  let_next_start();
  wait_for_earlier();

  Step<T, kByColumns> held[kHeld];
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = int(threadIdx.x) + i * threads;
    if (at < a.steps) held[i].load(x, a.columns, at);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (int(threadIdx.x) + i * threads < a.steps) held[i].most_of(most);
  }
  for (int at = behind; at < a.steps; at += threads) {
    Step<T, kByColumns> step;
    step.load(x, a.columns, at);
    step.most_of(most);
  }

  const float scale = fp8_scale<kFormat>(most_of_block(most, 0));
  const float inverse = __frcp_rn(scale);
  if (threadIdx.x == 0) a.scales[row] = scale;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = int(threadIdx.x) + i * threads;
    if (at < a.steps) held[i].template store<kFormat>(y, at, inverse);
  }
  for (int at = behind; at < a.steps; at += threads) {
    Step<T, kByColumns> step;
    step.load(x, a.columns, at);
    step.template store<kFormat>(y, at, inverse);
  }
}

}  // namespace
}  // namespace fuseline

int fuseline_to_fp8(const void* x, const float* columns, void* y, float* scales, int64_t rows, int64_t n, int64_t stride,
                    int dtype, int format, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0 || stride < 0 || n / kStep > (1 << 27)) return FUSELINE_BAD_SIZE;
  if (rows == 0) return 0;
  const int size = dtype == FUSELINE_FLOAT32 ? 4 : 2;
  if (n % kStep || stride * size % 16 || offset_in_vector(x) || offset_in_vector(y)) return FUSELINE_UNSUPPORTED;
  if (format != FUSELINE_E4M3 && format != FUSELINE_E5M2) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  const Fp8Rows a{x, columns, y, scales, stride, int(n / kStep)};
  const int steps_a_thread = rows > device.processors ? kHeld : 1;
  const int64_t warps = divide_up(a.steps, steps_a_thread * kWarp);
  const int threads = int(std::clamp<int64_t>(warps * kWarp, kWarp, kMostThreads));
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const auto run = [&](void (*kernel)(const Fp8Rows)) {
      return launch(kernel, a, rows, dim3(unsigned(threads)), 0, 1, stream, device.clusters);
    };
    if (format == FUSELINE_E4M3) return run(columns ? fp8_rows<T, __NV_E4M3, true> : fp8_rows<T, __NV_E4M3, false>);
    return run(columns ? fp8_rows<T, __NV_E5M2, true> : fp8_rows<T, __NV_E5M2, false>);
  });
}
