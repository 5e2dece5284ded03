// y = activation(gate) * up and its gradients: grad_gate = grad_out * up * activation'(gate), grad_up = grad_out *
// activation(gate).
//
// Moves: forward gate and up read once, y written once; backward those and grad_out read once, two gradients written
// once. Does: 10 to 40 operations an element. Limit: HBM bandwidth.
//
// Threads: a thread has 8 bytes of each tensor, and blocks lie side by side in memory. Rows without gaps are one row;
// halves of the rows of one tensor are read and written where they stand.
//
// SwiGLU forward of 2^27 elements in bf16, us (a copy of as many bytes takes 268): 8 bytes a thread 263, 16 bytes 266, two
// times 16 268; 16 bytes past the L1 276; 8 bytes in blocks of 128 threads 320, for no chip starts more than 800 blocks in
// a us; blocks that stay 287 to 301; bulk copies 271, in rings 288 to 302.

#include "device/activation.cuh"
#include "device/elementwise.cuh"
#include "plans/glu.h"

namespace fuseline {
namespace {

// Of gate and up.
template <class Activation>
struct Forward {
  static constexpr int kIn = 2, kOut = 1;
  static __device__ __forceinline__ void apply(const float (&in)[2], float, float (&out)[1]) {
    out[0] = Activation::value(in[0]) * in[1];
  }
};

// Of grad_out, gate and up, to grad_gate and grad_up.
template <class Activation>
struct Backward {
  static constexpr int kIn = 3, kOut = 2;
  static __device__ __forceinline__ void apply(const float (&in)[3], float, float (&out)[2]) {
    const float2 at = Activation::both(in[1]);
    out[0] = in[0] * in[2] * at.y;
    out[1] = in[0] * at.x;
  }
};

// Element e of all, counted without gaps, stands at e + (e / n) * gap.
template <int kIn, int kOut>
struct Tensors {
  const void* in[kIn];
  int64_t in_gap[kIn];  // elements from the end of a row to the next
  void* out[kOut];      // null where not wanted
  int64_t out_gap[kOut];
  int64_t elements;
  Divisor n;     // of a row
  bool vectors;  // rows begin at multiples of 8 bytes, and end there but for the last without gaps
};

// ---- kernels ----

// Of a multiprocessor: all of its threads, but where SiLU and its derivative are rounded once, in fp32.
template <class F>
constexpr int kBlocks = std::is_same_v<F, Backward<Silu<float>>> ? 6 : 8;

template <class F, class T>
__global__ void __launch_bounds__(kElementwiseBlock, kBlocks<F>) glu(const Tensors<F::kIn, F::kOut> a) {
  constexpr int kWide = kHalfVector<T>;
  let_next_start();
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kWide, left = a.elements - at;
  const int64_t row = a.n.divide(uint32_t(at));
  const T* in[F::kIn];
  T* out[F::kOut];
  uint64_t known = uint64_t(left);
#pragma unroll
  for (int s = 0; s < F::kIn; ++s) {
    in[s] = static_cast<const T*>(a.in[s]) + at + row * a.in_gap[s], known += number(in[s]);
  }
#pragma unroll
  for (int s = 0; s < F::kOut; ++s) {
    out[s] = static_cast<T*>(a.out[s]) + at + row * a.out_gap[s], known += number(out[s]);
  }
  known_by_now(known);
  wait_for_earlier();

  if (a.vectors && left >= kWide) {
    const float no_bias[kWide] = {};
    float of[F::kIn][kWide], result[F::kOut][kWide];
    Raw<T, kWide> raw[F::kIn];
#pragma unroll
    for (int s = 0; s < F::kIn; ++s) raw[s] = load_wide<T, kWide>(in[s]);
#pragma unroll
    for (int s = 0; s < F::kIn; ++s) widen<T, kWide>(raw[s], of[s]);
    apply_each<F>(of, no_bias, result);
#pragma unroll
    for (int s = 0; s < F::kOut; ++s) {
      if (a.out[s]) store_wide<T, kWide>(out[s], result[s]);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < int(min(left, int64_t(kWide))); ++i) {
    const int64_t element = at + i, behind = a.n.divide(uint32_t(element));  // so many rows
    const float no_bias[1] = {};
    float of[F::kIn][1], result[F::kOut][1];
#pragma unroll
    for (int s = 0; s < F::kIn; ++s) of[s][0] = to_float(static_cast<const T*>(a.in[s])[element + behind * a.in_gap[s]]);
    apply_each<F>(of, no_bias, result);
#pragma unroll
    for (int s = 0; s < F::kOut; ++s) {
      if (a.out[s]) static_cast<T*>(a.out[s])[element + behind * a.out_gap[s]] = from_float<T>(result[s][0]);
    }
  }
}

// ---- launchers ----

template <class F, class T>
int run(Tensors<F::kIn, F::kOut> a, int64_t rows, int64_t n, const Device& device, void* stream) {
  GluProblem problem{int(sizeof(T)), rows, n, false, true};
  const auto look = [&](const void* at, int64_t gap) {
    problem.gaps = problem.gaps || gap > 0;
    problem.whole = problem.whole && offset_in_vector(at) % kGluAccess == 0 && gap % kHalfVector<T> == 0;
  };
  for (int s = 0; s < F::kIn; ++s) look(a.in[s], a.in_gap[s]);
  for (int s = 0; s < F::kOut; ++s) look(a.out[s], a.out_gap[s]);
  const GluPlan plan = plan_glu(problem, device);
  a.vectors = plan.wide > 1;
  a.n = problem.gaps && plan.rows_at_once > 1 ? Divisor(uint32_t(n)) : Divisor::by_more_than_all();
  for (int64_t first = 0; first < rows; first += plan.rows_at_once) {
    const int64_t these = std::min(rows - first, plan.rows_at_once);
    a.elements = these * n;
    const LaunchShape shape = first == 0 ? plan.shape : shape_of_glu(sizeof(T), a.elements, device);
    const int error = launch(glu<F, T>, a, shape, device, stream);
    if (error) return error;
    for (int s = 0; s < F::kIn; ++s) a.in[s] = static_cast<const T*>(a.in[s]) + these * (n + a.in_gap[s]);
    for (int s = 0; s < F::kOut; ++s) {
      if (a.out[s]) a.out[s] = static_cast<T*>(a.out[s]) + these * (n + a.out_gap[s]);
    }
  }
  return 0;
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
  Tensors<2, 1> a{};
  a.in[0] = gate, a.in[1] = up, a.out[0] = y;
  a.in_gap[0] = a.in_gap[1] = stride - n;
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
  Tensors<3, 2> a{};
  a.in[0] = grad_out, a.in[1] = gate, a.in[2] = up, a.out[0] = grad_gate, a.out[1] = grad_up;
  a.in_gap[1] = a.in_gap[2] = stride - n;
  a.out_gap[0] = a.out_gap[1] = grad_stride - n;
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_activation<T>(activation, [&](auto chosen) {
      return run<Backward<decltype(chosen)>, T>(a, rows, n, device, stream);
    });
  });
}
