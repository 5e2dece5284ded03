// The activation between two linear layers in fp8, and its gradient: what the next product reads is made in the same pass
// (linear/fp8_rows.cuh).
//
//   GELU     forward: y = gelu(x + bias), and y's rows in fp8
//            backward: grad_x = grad_out * gelu'(x + bias), the rows of grad_x * columns in fp8, and the sum of grad_x
//            over rows
//   SwiGLU   the same of y = silu(x[:, :n]) * x[:, n:], without bias and sum
//
// Does: 15 to 45 operations an element, two of them on the special function units.

#include "device/activation.cuh"
#include "linear/fp8_rows.cuh"
#include "partials.h"

namespace fuseline {
namespace {

constexpr int64_t kWidestFp8Activation = int64_t(kMostThreads) * 2 * kFp8Vector;  // all of a row is held

template <class Activation>
struct Gelu {
  static constexpr int kIn = 1, kOut = 1, kHeld = 2, kBlocks = 2;
  static constexpr bool kMade = true, kSummed = false;
  static __device__ __forceinline__ void apply(const float (&in)[1], float bias, float (&out)[1]) {
    out[0] = Activation::value(in[0] + bias);
  }
};

// Of grad_out and x.
template <class Activation>
struct GeluGradient {
  static constexpr int kIn = 2, kOut = 1, kHeld = 2, kBlocks = 2;
  static constexpr bool kMade = true, kSummed = true;
  static __device__ __forceinline__ void apply(const float (&in)[2], float bias, float (&out)[1]) {
    out[0] = in[0] * Activation::both(in[1] + bias).y;
  }
};

// Of gate and up.
template <class Activation>
struct Gated {
  static constexpr int kIn = 2, kOut = 1, kHeld = 2, kBlocks = 2;
  static constexpr bool kMade = true, kSummed = false;
  static __device__ __forceinline__ void apply(const float (&in)[2], float, float (&out)[1]) {
    out[0] = Activation::value(in[0]) * in[1];
  }
};

// Of grad_out, gate and up, to grad_gate and grad_up.
template <class Activation>
struct GatedGradient {
  static constexpr int kIn = 3, kOut = 2, kHeld = 2, kBlocks = 2;
  static constexpr bool kMade = true, kSummed = false;
  static __device__ __forceinline__ void apply(const float (&in)[3], float, float (&out)[2]) {
    const float2 at = Activation::both(in[1]);
    out[0] = in[0] * in[2] * at.y;
    out[1] = in[0] * at.x;
  }
};

// ---- launchers ----

template <class Source, class T>
int run_source(const Fp8Rows& a, void* grad_bias, const Device& device, void* stream) {
  const int error = launch_fp8_rows<Source, T>(a, device, stream);
  if (error || !a.sums) return error;
  const int64_t count = fp8_rows_at_once<Source>(a.rows, a.vectors, device);
  return run_add_partials(a.sums, count, int64_t(a.vectors) * kFp8Vector, grad_bias, FUSELINE_FLOAT32, device, stream);
}

template <class T, bool kBackward>
int run_activation(int activation, const Fp8Rows& a, void* grad_bias, const Device& device, void* stream) {
  const auto run = [&](auto forward, auto backward) {
    using Source = std::conditional_t<kBackward, decltype(backward), decltype(forward)>;
    return run_source<Source, T>(a, grad_bias, device, stream);
  };
  if (activation == FUSELINE_SILU) return run(Gated<Silu<T>>{}, GatedGradient<Silu<T>>{});
  if (activation == FUSELINE_GELU_TANH) return run(Gelu<GeluTanh<T>>{}, GeluGradient<GeluTanh<T>>{});
  return run(Gelu<GeluErf<T>>{}, GeluGradient<GeluErf<T>>{});
}

template <bool kBackward>
int run_any(const void* grad_out, const void* x, int64_t n, int activation, int dtype, Fp8Rows a, void* grad_bias,
            void* stream) {
  if (a.rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (a.rows == 0) return 0;
  if (n == 0 || n % kFp8Multiple || n > kWidestFp8Activation) return FUSELINE_UNSUPPORTED;
  for (const void* at : {grad_out, x, static_cast<const void*>(a.wide), static_cast<const void*>(a.narrow),
                         static_cast<const void*>(a.bias), static_cast<const void*>(a.columns)}) {
    if (offset_in_vector(at)) return FUSELINE_UNSUPPORTED;
  }
  if (activation < FUSELINE_SILU || activation > FUSELINE_GELU_ERF) return FUSELINE_UNSUPPORTED;
  const bool gated = activation == FUSELINE_SILU;
  if (gated && (a.bias || grad_bias)) return FUSELINE_UNSUPPORTED;
  a.vectors = int(n / kFp8Vector);
  const void* const of_x[] = {x, static_cast<const uint16_t*>(x) + n};
  if (kBackward) a.in[0] = grad_out, a.stride[0] = n;
  for (int s = 0; s <= int(gated); ++s) a.in[kBackward + s] = of_x[s], a.stride[kBackward + s] = gated ? 2 * n : n;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  if (dtype != FUSELINE_BFLOAT16) return FUSELINE_UNSUPPORTED;
  return run_activation<__nv_bfloat16, kBackward>(activation, a, grad_bias, device, stream);
}

}  // namespace
}  // namespace fuseline

int fuseline_activation_fp8_forward(const void* x, const float* bias, void* y, void* y8, float* scales, int64_t rows,
                                    int64_t n, int activation, int dtype, void* stream) {
  using namespace fuseline;
  Fp8Rows a{};
  a.bias = bias, a.wide = y, a.narrow = static_cast<uint8_t*>(y8), a.scales = scales, a.rows = rows;
  return run_any<false>(nullptr, x, n, activation, dtype, a, nullptr, stream);
}

int64_t fuseline_activation_fp8_partials(int64_t rows, int64_t n) {
  using namespace fuseline;
  Device device;
  if (rows <= 0 || n <= 0 || n > kWidestFp8Activation || current_device(device) != cudaSuccess) return 0;
  return fp8_rows_at_once<GeluGradient<GeluErf<__nv_bfloat16>>>(rows, n / kFp8Vector, device);
}

int fuseline_activation_fp8_backward(const void* grad_out, const void* x, const float* bias, const float* columns,
                                     void* grad_x, void* grad_x8, float* scales, float* grad_bias, float* partials,
                                     int64_t rows, int64_t n, int activation, int dtype, int format, void* stream) {
  using namespace fuseline;
  if (format != FUSELINE_E4M3 && format != FUSELINE_E5M2) return FUSELINE_UNSUPPORTED;
  if (rows == 0 && grad_bias) {
    return int(cudaMemsetAsync(grad_bias, 0, size_t(n) * sizeof(float), static_cast<cudaStream_t>(stream)));
  }
  Fp8Rows a{};
  a.bias = bias, a.columns = columns, a.wide = grad_x, a.narrow = static_cast<uint8_t*>(grad_x8), a.scales = scales;
  a.sums = grad_bias ? partials : nullptr, a.rows = rows, a.e5m2 = format == FUSELINE_E5M2;
  return run_any<true>(grad_out, x, n, activation, dtype, a, grad_bias, stream);
}
