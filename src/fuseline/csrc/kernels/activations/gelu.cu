// y = gelu(x + bias) and its gradients: grad_x = grad_out * gelu'(x + bias), grad_bias = the sum of grad_x over rows.
//
// Moves: forward x read once, y written once; backward x and grad_out read once, grad_x written once, and with the
// bias's gradient fp32 rows of partial sums, one for each row of blocks. Does: 10 to 40 operations an element, two of
// them on the special function units. Limit: HBM bandwidth.
//
// Threads: as in elementwise.cuh. Rows that are short, or that do not keep to 8-byte steps, are taken several at a
// time, so many that together they do: the bias then repeats along such a long row. With the bias's gradient a block
// has some neighbouring positions of about 64 rows, its threads every so-manieth of them, four at a turn, and goes, which
// takes 2 to 5% less time than blocks that stay. The sums meet in shared memory at the end, and a second
// kernel adds up what the blocks found, in a fixed order. Few rows: activations/gelu_few.cuh.

#include "device/activation.cuh"
#include "device/elementwise.cuh"
#include "gelu_few.cuh"
#include "partials.h"

#include <initializer_list>

namespace fuseline {
namespace {

template <class Activation>
struct Forward {
  static constexpr int kIn = 1, kOut = 1, kRows = kGeluRows;
  static __device__ __forceinline__ void apply(const float (&in)[1], float bias, float (&out)[1]) {
    out[0] = Activation::value(in[0] + bias);
  }
};

// Of grad_out and x.
template <class Activation>
struct Backward {
  static constexpr int kIn = 2, kOut = 1, kRows = kGeluRows;
  static __device__ __forceinline__ void apply(const float (&in)[2], float bias, float (&out)[1]) {
    out[0] = in[0] * Activation::both(in[1] + bias).y;
  }
};

struct BiasGradients {
  const void* grad_out;
  const void* x;
  const void* bias;
  void* grad_x;       // null if not wanted
  float* partials;    // [groups, columns], columns being n if `fold`, else row_elements
  int64_t elements, row_elements, rows;
  int64_t n;          // columns repeat every n along a row
  int64_t blocks;     // along a row
  int64_t turns;      // of a block, each kBiasRows rows of a thread
  bool fp32_bias;
  bool bias_vectors;
  bool whole;         // the tensors begin at multiples of 8 bytes; else elements are read and written one by one
  bool fold;          // a row is one block's: add its repetitions up at once
};

// ---- kernels ----

template <class Activation, class T>
__global__ void __launch_bounds__(kBiasThreads, kBiasBlocks) gelu_bias_gradients(const BiasGradients a) {
  constexpr int kWide = kHalfVector<T>;
  __shared__ float shared[kBiasThreads * kWide];  // [blockDim.y][kWide][blockDim.x]
  let_next_start();
  const int across = int(blockDim.x), down = int(blockDim.y), width = across * kWide;
  const uint32_t group = blockIdx.x / uint32_t(a.blocks), block = blockIdx.x - group * uint32_t(a.blocks);
  const int64_t first = (int64_t(block) * across + threadIdx.x) * kWide;
  const bool mine = first < a.row_elements;
  const int64_t last = mine ? a.elements - kWide : -1;  // where an access may begin
  const int64_t step = down * a.row_elements;
  int64_t at = (int64_t(group) * a.turns * kBiasRows * down + threadIdx.y) * a.row_elements + first;
  const T* grad_out = static_cast<const T*>(a.grad_out);
  const T* x = static_cast<const T*>(a.x);
  T* grad_x = static_cast<T*>(a.grad_x);
  known_by_now(uint64_t(at) + uint64_t(last) + number(grad_out) + number(x) + number(grad_x));
  wait_for_earlier();

  float bias[kWide], sums[kWide] = {};
  const auto gradient = [&](const float (&grad)[kWide], const float (&value)[kWide], float (&result)[kWide]) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      result[i] = grad[i] * Activation::both(value[i] + bias[i]).y;
      sums[i] += result[i];
    }
  };
  // What there is of the access at `from`, element by element.
  const auto take_apart = [&](int64_t from) {
    float grad[kWide], value[kWide], result[kWide];
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const bool there = from + i < a.elements;
      grad[i] = there ? to_float(grad_out[from + i]) : 0.f;
      value[i] = there ? to_float(x[from + i]) : 0.f;
    }
    gradient(grad, value, result);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      if (a.grad_x && from + i < a.elements) grad_x[from + i] = from_float<T>(result[i]);
    }
  };
  if (!a.whole) {
    load_repeated<T, kWide>(a.bias, a.fp32_bias, a.bias_vectors, mine ? first : 0, a.n, bias);
#pragma unroll 1
    for (int64_t row = 0; mine && row < a.turns * kBiasRows && at < a.elements; ++row, at += step) take_apart(at);
  }
#pragma unroll 1
  for (int64_t turn = 0; a.whole && turn < a.turns; ++turn, at += kBiasRows * step) {
    Raw<T, kWide> raw[kBiasRows][2];
#pragma unroll
    for (int u = 0; u < kBiasRows; ++u) {
      if (at + u * step > last) continue;
      raw[u][0] = load_wide<T, kWide>(grad_out + at + u * step);
      raw[u][1] = load_wide<T, kWide>(x + at + u * step);
    }
    if (turn == 0) load_repeated<T, kWide>(a.bias, a.fp32_bias, a.bias_vectors, mine ? first : 0, a.n, bias);
#pragma unroll
    for (int u = 0; u < kBiasRows; ++u) {
      if (at + u * step > last) continue;
      float grad[kWide], value[kWide], result[kWide];
      widen<T, kWide>(raw[u][0], grad);
      widen<T, kWide>(raw[u][1], value);
      gradient(grad, value, result);
      if (a.grad_x) store_wide<T, kWide>(grad_x + at + u * step, result);
    }
  }
  // The end of the last row, if it does not fill an access.
  const int64_t end = (a.rows - 1) * a.row_elements + first;
  const bool ends = mine && group == 0 && threadIdx.y == 0 && end < a.elements && end + kWide > a.elements;
  if (a.whole && ends) take_apart(end);

#pragma unroll
  for (int i = 0; i < kWide; ++i) shared[threadIdx.y * width + i * across + threadIdx.x] = sums[i];
  __syncthreads();
  const int thread = int(threadIdx.y) * across + int(threadIdx.x);
  for (int c = thread; c < width; c += kBiasThreads) {
    float sum = 0.f;
    for (int y = 0; y < down; ++y) sum += shared[y * width + c];
    shared[c] = sum;
  }
  __syncthreads();
  const int64_t columns = a.fold ? a.n : min(int64_t(width), a.row_elements - int64_t(block) * width);
  float* const to = a.partials + group * (a.fold ? a.n : a.row_elements) + int64_t(block) * width;
  for (int c = thread; c < columns; c += kBiasThreads) {
    const int64_t repeated = a.fold ? a.row_elements : c + 1;
    float sum = 0.f;
    for (int64_t r = c; r < repeated; r += a.n) sum += shared[int(r) % kWide * across + int(r) / kWide];
    to[c] = sum;
  }
}

// ---- launchers ----

bool whole_vectors(const void* bias, bool fp32_bias, int64_t n, int wide) {
  return n % wide == 0 && offset_in_vector(bias) == 0 && (!fp32_bias || n % 4 == 0);
}

int aligned_to(std::initializer_list<const void*> tensors) {
  int bytes = 16;
  for (const void* at : tensors) bytes = std::min(bytes, offset_in_vector(at) == 0 ? 16 : offset_in_vector(at) == 8 ? 8 : 1);
  return bytes;
}

template <class F, class T>
int run_flat(Streams<F::kIn, F::kOut> a, int64_t n, const GeluPlan& plan, const Device& device, void* stream) {
  a.bias_n = n;
  a.bias_vectors = whole_vectors(a.bias, a.fp32_bias, n, kHalfVector<T>);
  a.whole = plan.wide > 1;
  return launch_elementwise<F, T>(a, plan.walk, plan.shape, device, stream);
}

template <class T, class Run>
int with_activation(int approximate, Run&& run) {
  if (approximate == FUSELINE_GELU_TANH) return run(GeluTanh<T>{});
  return run(GeluErf<T>{});
}

template <class Activation, class T>
int run_bias_gradients(BiasGradients a, int64_t rows, void* grad_bias, int bias_dtype, const GeluPlan& plan,
                       const Device& device, void* stream) {
  a.bias_vectors = whole_vectors(a.bias, a.fp32_bias, a.n, kHalfVector<T>);
  if constexpr (!std::is_same_v<T, __half>) {
    if (plan.kernel == GeluKernel::bias_gradients_few) {
      const FewBiasGradients of_few{a.grad_out, a.x,        a.bias,      a.grad_x,    grad_bias,
                                    rows,       a.n,        plan.across, a.fp32_bias, a.bias_vectors};
      return launch(gelu_bias_gradients_few<Activation, T>, of_few, plan.shape, device, stream);
    }
  }
  const BiasPlan& bias = plan.bias;
  a.elements = rows * a.n, a.row_elements = bias.row_elements, a.rows = bias.rows, a.fold = bias.fold;
  a.blocks = bias.blocks, a.turns = bias.turns, a.whole = plan.wide > 1;
  const int error = launch(gelu_bias_gradients<Activation, T>, a, plan.shape, device, stream);
  if (error) return error;
  return run_add_partials(a.partials, bias.partial_rows(a.n), a.n, grad_bias, bias_dtype, device, stream);
}

bool known_gelu(int approximate) { return approximate == FUSELINE_GELU_TANH || approximate == FUSELINE_GELU_ERF; }

}  // namespace
}  // namespace fuseline

int fuseline_gelu_forward(const void* x, const void* bias, void* y, int64_t rows, int64_t n, int approximate, int dtype,
                          int bias_dtype, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (!known_gelu(approximate) || (bias && !weights_fit(bias_dtype, dtype))) return FUSELINE_UNSUPPORTED;
  if (rows == 0 || n == 0) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  Streams<1, 1> a{};
  a.in[0] = x, a.out[0] = y, a.bias = bias, a.fp32_bias = bias_dtype == FUSELINE_FLOAT32;
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const GeluPlan plan = plan_gelu({int(sizeof(T)), rows, n, aligned_to({x, y}), bias != nullptr, false}, device);
    return with_activation<T>(approximate, [&](auto activation) {
      return run_flat<Forward<decltype(activation)>, T>(a, n, plan, device, stream);
    });
  });
}

size_t fuseline_gelu_backward_workspace(int64_t rows, int64_t n, int dtype) {
  using namespace fuseline;
  Device device;
  if (rows <= 0 || n <= 0 || current_device(device) != cudaSuccess) return 0;
  int64_t partial_rows = 0;
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    partial_rows = plan_bias(sizeof(T), rows, n, kHalfVector<T>, device).partial_rows(n);
    return 0;
  });
  return size_t(partial_rows * n) * sizeof(float);
}

int fuseline_gelu_backward(const void* grad_out, const void* x, const void* bias, void* grad_x, void* grad_bias,
                           void* workspace, int64_t rows, int64_t n, int approximate, int dtype, int bias_dtype,
                           void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (!known_gelu(approximate) || ((bias || grad_bias) && !weights_fit(bias_dtype, dtype))) return FUSELINE_UNSUPPORTED;
  const bool fp32_bias = bias_dtype == FUSELINE_FLOAT32;
  if (n == 0 || (!grad_x && !grad_bias)) return 0;
  if (rows == 0) {
    if (!grad_bias) return 0;
    return int(cudaMemsetAsync(grad_bias, 0, size_t(n) * (fp32_bias ? 4 : 2), static_cast<cudaStream_t>(stream)));
  }
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const GeluProblem problem{int(sizeof(T)), rows, n, aligned_to({grad_out, x, grad_x}), bias != nullptr, grad_bias != nullptr,
                              std::is_same_v<T, __half>};
    const GeluPlan plan = plan_gelu(problem, device);
    return with_activation<T>(approximate, [&](auto activation) {
      using Activation = decltype(activation);
      if (!grad_bias) {
        Streams<2, 1> a{};
        a.in[0] = grad_out, a.in[1] = x, a.out[0] = grad_x, a.bias = bias, a.fp32_bias = fp32_bias;
        return run_flat<Backward<Activation>, T>(a, n, plan, device, stream);
      }
      BiasGradients a{};
      a.grad_out = grad_out, a.x = x, a.bias = bias, a.grad_x = grad_x, a.partials = static_cast<float*>(workspace);
      a.n = n, a.fp32_bias = fp32_bias;
      return run_bias_gradients<Activation, T>(a, rows, grad_bias, bias_dtype, plan, device, stream);
    });
  });
}
