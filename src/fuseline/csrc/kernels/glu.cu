// y = activation(gate) * up and its gradients: grad_gate = grad_out * up * activation'(gate), grad_up = grad_out *
// activation(gate).
//
// Moves: forward gate and up read once, y written once; backward those and grad_out read once, two gradients written
// once. Does: 10 to 40 operations an element. Limit: HBM bandwidth.
//
// Threads: as in elementwise.cuh. Rows without gaps are taken as one flat tensor; halves of the rows of one tensor are
// read and written where they stand.

#include "device/activation.cuh"
#include "device/elementwise.cuh"

namespace fuseline {
namespace {

// Of gate and up.
template <class Activation>
struct Forward {
  static constexpr int kIn = 2, kOut = 1, kRows = 2;
  static __device__ __forceinline__ void apply(const float (&in)[2], float, float (&out)[1]) {
    out[0] = Activation::value(in[0]) * in[1];
  }
};

// Of grad_out, gate and up, to grad_gate and grad_up.
template <class Activation>
struct Backward {
  static constexpr int kIn = 3, kOut = 2, kRows = 2;
  static __device__ __forceinline__ void apply(const float (&in)[3], float, float (&out)[2]) {
    const float2 at = Activation::both(in[1]);
    out[0] = in[0] * in[2] * at.y;
    out[1] = in[0] * at.x;
  }
};

// ---- launchers ----

template <class F, class T, int kWide>
int run_wide(Streams<F::kIn, F::kOut> a, int64_t rows, int64_t n, const Device& device, void* stream) {
  bool flat = true;
  for (const int64_t stride : a.in_stride) flat = flat && stride == n;
  for (const int64_t stride : a.out_stride) flat = flat && stride == n;
  if (!flat) return run_elementwise<F, T, kWide>(a, rows * n, n, device, stream);
  for (int64_t& stride : a.in_stride) stride = kFlatRow<kWide>;
  for (int64_t& stride : a.out_stride) stride = kFlatRow<kWide>;
  return run_elementwise<F, T, kWide>(a, rows * n, kFlatRow<kWide>, device, stream);
}

template <class F, class T>
int run(Streams<F::kIn, F::kOut> a, int64_t rows, int64_t n, const Device& device, void* stream) {
  // A flat tensor may end within an access; rows apart may not.
  Streams<F::kIn, F::kOut> bases = a;
  bool flat = true;
  for (int64_t& stride : bases.in_stride) flat = flat && stride == n, stride = flat ? 0 : stride;
  for (int64_t& stride : bases.out_stride) flat = flat && stride == n, stride = flat ? 0 : stride;
  const bool vectors = flat ? in_vectors<T>(bases) : n % kVector<T> == 0 && in_vectors<T>(a);
  if (vectors) return run_wide<F, T, kVector<T>>(a, rows, n, device, stream);
  return run_wide<F, T, 1>(a, rows, n, device, stream);
}

template <class T, class Run>
int with_activation(int activation, Run&& run) {
  if (activation == FUSELINE_SILU) return run(Silu<T>{});
  if (activation == FUSELINE_GELU_TANH) return run(GeluTanh<T>{});
  return run(GeluErf<T>{});
}

bool known_activation(int activation) { return activation >= FUSELINE_SILU && activation <= FUSELINE_GELU_ERF; }

}  // namespace
}  // namespace fuseline

int fuseline_glu_forward(const void* gate, const void* up, void* y, int64_t rows, int64_t n, int64_t stride,
                         int activation, int dtype, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (!known_activation(activation)) return FUSELINE_UNSUPPORTED;
  if (rows == 0 || n == 0) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  Streams<2, 1> a{};
  a.in[0] = gate, a.in[1] = up, a.out[0] = y;
  a.in_stride[0] = a.in_stride[1] = stride, a.out_stride[0] = n;
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_activation<T>(activation, [&](auto chosen) {
      return run<Forward<decltype(chosen)>, T>(a, rows, n, device, stream);
    });
  });
}

int fuseline_glu_backward(const void* grad_out, const void* gate, const void* up, void* grad_gate, void* grad_up,
                          int64_t rows, int64_t n, int64_t stride, int64_t grad_stride, int activation, int dtype,
                          void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (!known_activation(activation)) return FUSELINE_UNSUPPORTED;
  if (rows == 0 || n == 0 || (!grad_gate && !grad_up)) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  Streams<3, 2> a{};
  a.in[0] = grad_out, a.in[1] = gate, a.in[2] = up, a.out[0] = grad_gate, a.out[1] = grad_up;
  a.in_stride[0] = n, a.in_stride[1] = a.in_stride[2] = stride;
  a.out_stride[0] = a.out_stride[1] = grad_stride;
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_activation<T>(activation, [&](auto chosen) {
      return run<Backward<decltype(chosen)>, T>(a, rows, n, device, stream);
    });
  });
}
