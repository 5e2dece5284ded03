// y = gelu(x + bias) and its gradients: grad_x = grad_out * gelu'(x + bias), grad_bias = the sum of grad_x over rows.
//
// Moves: forward x read once, y written once; backward x and grad_out read once, grad_x written once, and with the
// bias's gradient fp32 rows of partial sums, one for each row of blocks. Does: 10 to 40 operations an element, two of
// them on the special function units. Limit: HBM bandwidth.
//
// Threads: as in elementwise.cuh. Rows that are short, or that do not keep to 8-byte steps, are taken several at a
// time, so many that together they do: the bias then repeats along such a long row. With the bias's gradient a block
// has up to 256 neighbouring positions, and its threads every so-manieth row of them, the next ones on their way while
// these are computed. The sums stay in registers, meet in shared memory at the end, and a second kernel adds up what the
// blocks found, in a fixed order. Few rows: device/gelu_few.cuh.

#include "device/activation.cuh"
#include "device/elementwise.cuh"
#include "device/gelu_few.cuh"
#include "device/partials.cuh"

#include <limits>

namespace fuseline {
namespace {

template <class Activation>
struct Forward {
  static constexpr int kIn = 1, kOut = 1, kRows = 2;
  static __device__ __forceinline__ void apply(const float (&in)[1], float bias, float (&out)[1]) {
    out[0] = Activation::value(in[0] + bias);
  }
};

// Of grad_out and x.
template <class Activation>
struct Backward {
  static constexpr int kIn = 2, kOut = 1, kRows = 2;
  static __device__ __forceinline__ void apply(const float (&in)[2], float bias, float (&out)[1]) {
    out[0] = in[0] * Activation::both(in[1] + bias).y;
  }
};

struct BiasGradients {
  const void* grad_out;
  const void* x;
  const void* bias;
  void* grad_x;       // null if not wanted
  float* partials;    // [shares, columns], columns being n if `fold`, else row_elements
  int64_t elements, row_elements, rows;
  int64_t n;          // columns repeat every n along a row
  int64_t columns;    // blocks along a row
  int64_t shares;     // and along the rows
  bool fp32_bias;
  bool bias_vectors;
  bool fold;          // a row is one block's: add its repetitions up at once
};

// Of 4,096, 768 and 1,000 columns in bf16, share of the copy bandwidth: two rows ahead and two blocks 0.928, 0.932, 0.907;
// four rows ahead 0.921, 0.919, 0.878; two rows ahead and three blocks 0.911, 0.922, 0.880; two rows not ahead and four
// blocks 0.905, 0.917, 0.884, where the last 15% of the rows come as room is left 0.916, 0.929, 0.892.
constexpr int kBiasThreads = 256;
constexpr int kBiasRows = 2;    // of a thread in flight
constexpr int kBiasBlocks = 2;  // a multiprocessor holds at once
constexpr int kMostWaves = 4;   // of blocks, where rows are so wide that one leaves many multiprocessors free
constexpr int kAcrossJoined = 64;  // threads of a block along joined rows: wider blocks leave more partial sums

// ---- kernels ----

template <class Activation, class T, int kWide>
__global__ void __launch_bounds__(kBiasThreads, kBiasBlocks) gelu_bias_gradients(const BiasGradients a) {
  __shared__ float shared[kBiasThreads * kWide];  // [blockDim.y][blockDim.x * kWide]
  let_next_start();
  wait_for_earlier();
  const T* grad_out = static_cast<const T*>(a.grad_out);
  const T* x = static_cast<const T*>(a.x);
  T* grad_x = static_cast<T*>(a.grad_x);
  const uint32_t share = blockIdx.x / uint32_t(a.columns), column_block = blockIdx.x - share * uint32_t(a.columns);
  const int64_t first = (int64_t(column_block) * blockDim.x + threadIdx.x) * kWide;
  const bool mine = first < a.row_elements;
  const int64_t last = mine ? a.elements - kWide : -1;  // where an access may begin
  const int64_t step = a.shares * blockDim.y * kBiasRows;
  float bias[kWide], sums[kWide] = {};
  load_repeated<T, kWide>(a.bias, a.fp32_bias, a.bias_vectors, mine ? first : 0, a.n, bias);

  const auto gradient = [&](const float (&grad)[kWide], const float (&value)[kWide], float (&result)[kWide]) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      result[i] = grad[i] * Activation::both(value[i] + bias[i]).y;
      sums[i] += result[i];
    }
  };

  Raw<T, kWide> next[kBiasRows][2];
  const auto fetch = [](const T* at) {
    if constexpr (kWide > 1) {
      return load_lines_now(at);
    } else {
      return *at;
    }
  };
  const auto load = [&](int64_t row) {
    const int64_t at = row * a.row_elements + first;
#pragma unroll
    for (int u = 0; u < kBiasRows; ++u) {
      if (at + u * a.row_elements > last) continue;
      next[u][0] = fetch(grad_out + at + u * a.row_elements);
      next[u][1] = fetch(x + at + u * a.row_elements);
    }
  };
  int64_t row = (int64_t(share) * blockDim.y + threadIdx.y) * kBiasRows;
  load(row);
  for (; row < a.rows; row += step) {
    Raw<T, kWide> raw[kBiasRows][2];
#pragma unroll
    for (int u = 0; u < kBiasRows; ++u) raw[u][0] = next[u][0], raw[u][1] = next[u][1];
    load(row + step);
    const int64_t at = row * a.row_elements + first;
#pragma unroll
    for (int u = 0; u < kBiasRows; ++u) {
      if (at + u * a.row_elements > last) continue;
      float grad[kWide], value[kWide], result[kWide];
      widen<T, kWide>(raw[u][0], grad);
      widen<T, kWide>(raw[u][1], value);
      gradient(grad, value, result);
      if (a.grad_x) store_wide<T, kWide>(grad_x + at + u * a.row_elements, result);
    }
  }
  // The end of the last row, if it does not fill an access.
  if constexpr (kWide > 1) {
    const int64_t at = (a.rows - 1) * a.row_elements + first;
    if (mine && share == 0 && threadIdx.y == 0 && at < a.elements && at + kWide > a.elements) {
      float grad[kWide], value[kWide], result[kWide];
      const int64_t left = a.elements - at;
      widen<T, kWide>(load_vector<T, false, int64_t>(grad_out + at, 0, left, false), grad);
      widen<T, kWide>(load_vector<T, false, int64_t>(x + at, 0, left, false), value);
      gradient(grad, value, result);
      if (a.grad_x) store_vector<T, false, int64_t>(grad_x + at, 0, left, false, result);
    }
  }

  const int width = blockDim.x * kWide;
#pragma unroll
  for (int i = 0; i < kWide; ++i) shared[threadIdx.y * width + threadIdx.x * kWide + i] = sums[i];
  __syncthreads();
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (a.fold) {
    for (int64_t c = thread; c < a.n; c += kBiasThreads) {
      float sum = 0.f;
      for (int64_t repeat = c; repeat < a.row_elements; repeat += a.n) {
        for (int y = 0; y < int(blockDim.y); ++y) sum += shared[y * width + repeat];
      }
      a.partials[int64_t(share) * a.n + c] = sum;
    }
    return;
  }
  for (int column = thread; column < width; column += kBiasThreads) {
    const int64_t of_row = int64_t(column_block) * width + column;
    if (of_row >= a.row_elements) return;
    float sum = 0.f;
    for (int y = 0; y < int(blockDim.y); ++y) sum += shared[y * width + column];
    a.partials[int64_t(share) * a.row_elements + of_row] = sum;
  }
}

// ---- launchers ----

// How rows of n are taken together into rows of whole accesses, about a warp's at least; if a few of them end with a
// warp's 512 bytes or at least with a line of the cache, so many.
template <class T>
int64_t joined(int64_t n, int wide) {
  constexpr int64_t kEnds[2] = {512, 128}, kLongest = 16384;
  int64_t least = 1;
  while (least < wide && n * least % wide != 0) least *= 2;
  const int64_t positions = n * least / wide;
  least *= std::max<int64_t>(1, kWarp / std::max<int64_t>(1, positions));
  for (const int64_t end : kEnds) {
    for (int64_t rows = least; rows == least || n * rows <= kLongest; rows *= 2) {
      if (n * rows * int64_t(sizeof(T)) % end == 0) return rows;
    }
  }
  return least;
}

// The grid of the kernel with the bias's gradient, and what it leaves behind.
struct BiasPlan {
  int64_t row_elements = 0, rows = 0;
  int64_t across = kWarp;  // threads of a block along a row
  int64_t columns = 0;     // blocks along a row
  int64_t shares = 0;      // and along the rows
  bool fold = false;
  int64_t partial_rows(int64_t n) const { return shares * (fold ? 1 : row_elements / n); }
};

template <class T>
BiasPlan plan_bias(int64_t rows, int64_t n, int wide, const Device& device) {
  BiasPlan plan;
  plan.row_elements = n * joined<T>(n, wide);
  plan.rows = divide_up(rows * n, plan.row_elements);
  // The widest blocks that leave few threads without a position: they read the longest runs of memory.
  const int64_t positions = divide_up(plan.row_elements, wide);
  const int64_t widest = plan.row_elements == n ? kBiasThreads : kAcrossJoined;
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (int64_t across = widest; across >= kWarp; across /= 2) {
    const int64_t laid = divide_up(positions, across) * across;
    if (laid + positions / 16 < fewest) fewest = laid, plan.across = across;
  }
  plan.columns = divide_up(positions, plan.across);
  plan.fold = plan.columns == 1;
  const int64_t turn = kBiasThreads / plan.across * kBiasRows;  // rows of a block at a time
  const int64_t room = int64_t(device.processors) * kBiasBlocks;
  plan.shares = std::max<int64_t>(1, room / plan.columns);
  // Wide rows may leave a good part of the chip without a block: more shares than run at once then fill it better.
  const auto filled = [&](int64_t shares) {
    const int64_t blocks = plan.columns * shares;
    return double(blocks) / double(divide_up(blocks, room) * room);
  };
  for (int64_t more = plan.shares + 1; more <= kMostWaves; ++more) {
    if (filled(more) > filled(plan.shares) + 0.05) plan.shares = more;
  }
  plan.shares = std::min(plan.shares, divide_up(plan.rows, turn));
  return plan;
}

bool whole_vectors(const void* bias, bool fp32_bias, int64_t n, int wide) {
  return n % wide == 0 && offset_in_vector(bias) == 0 && (!fp32_bias || n % 4 == 0);
}

template <class F, class T>
int run_flat(Streams<F::kIn, F::kOut> a, int64_t rows, int64_t n, const Device& device, void* stream) {
  const auto run = [&](auto wide) {
    constexpr int kWide = decltype(wide)::value;
    a.bias_n = n;
    a.bias_vectors = whole_vectors(a.bias, a.fp32_bias, n, kWide);
    const int64_t row = a.bias ? n * joined<T>(n, kWide) : kFlatRow<kWide>;
    return run_elementwise<F, T, kWide>(a, rows * n, row, device, stream);
  };
  bool vectors = true;
  for (const void* at : a.in) vectors = vectors && offset_in_vector(at) % 8 == 0;
  for (const void* at : a.out) vectors = vectors && offset_in_vector(at) % 8 == 0;
  return vectors ? run(std::integral_constant<int, kHalfVector<T>>{}) : run(std::integral_constant<int, 1>{});
}

template <class T, class Run>
int with_activation(int approximate, Run&& run) {
  if (approximate == FUSELINE_GELU_TANH) return run(GeluTanh<T>{});
  return run(GeluErf<T>{});
}

template <class Activation, class T>
int run_bias_gradients(BiasGradients a, int64_t rows, void* grad_bias, const Device& device, void* stream) {
  constexpr int kSize = kVector<T>;
  const bool vectors =
      offset_in_vector(a.grad_out) == 0 && offset_in_vector(a.x) == 0 && offset_in_vector(a.grad_x) == 0;
  const int wide = vectors ? kSize : 1;
  const FewBiasPlan few = vectors ? plan_few_bias(rows, a.n, kSize, device) : FewBiasPlan{};
  if (few.threads > 0) {
    const FewBiasGradients of_few{a.grad_out,  a.x, a.bias,     a.grad_x,    grad_bias,
                                  rows,        a.n, few.across, a.fp32_bias, whole_vectors(a.bias, a.fp32_bias, a.n, wide)};
    return launch(gelu_bias_gradients_few<Activation, T>, of_few, few.blocks, dim3(unsigned(few.threads)), 0, 1, stream,
                  device.clusters);
  }
  const BiasPlan plan = plan_bias<T>(rows, a.n, wide, device);
  a.elements = rows * a.n, a.row_elements = plan.row_elements, a.rows = plan.rows, a.fold = plan.fold;
  a.columns = plan.columns, a.shares = plan.shares;
  a.bias_vectors = whole_vectors(a.bias, a.fp32_bias, a.n, wide);
  const auto kernel = vectors ? gelu_bias_gradients<Activation, T, kSize> : gelu_bias_gradients<Activation, T, 1>;
  const int error = launch(kernel, a, plan.columns * plan.shares,
                           dim3(unsigned(plan.across), unsigned(kBiasThreads / plan.across)), 0, 1, stream,
                           device.clusters);
  if (error) return error;
  return run_add_partials<T>(a.partials, plan.partial_rows(a.n), a.n, grad_bias, a.fp32_bias, device, stream);
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
    return with_activation<T>(approximate, [&](auto activation) {
      return run_flat<Forward<decltype(activation)>, T>(a, rows, n, device, stream);
    });
  });
}

size_t fuseline_gelu_backward_workspace(int64_t rows, int64_t n, int dtype) {
  using namespace fuseline;
  Device device;
  if (rows <= 0 || n <= 0 || current_device(device) != cudaSuccess) return 0;
  int64_t most = 0;
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    for (const int wide : {1, kVector<T>}) most = std::max(most, plan_bias<T>(rows, n, wide, device).partial_rows(n));
    return 0;
  });
  return size_t(most * n) * sizeof(float);
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
    return with_activation<T>(approximate, [&](auto activation) {
      using Activation = decltype(activation);
      if (!grad_bias) {
        Streams<2, 1> a{};
        a.in[0] = grad_out, a.in[1] = x, a.out[0] = grad_x, a.bias = bias, a.fp32_bias = fp32_bias;
        return run_flat<Backward<Activation>, T>(a, rows, n, device, stream);
      }
      BiasGradients a{};
      a.grad_out = grad_out, a.x = x, a.bias = bias, a.grad_x = grad_x, a.partials = static_cast<float*>(workspace);
      a.n = n, a.fp32_bias = fp32_bias;
      return run_bias_gradients<Activation, T>(a, rows, grad_bias, device, stream);
    });
  });
}
