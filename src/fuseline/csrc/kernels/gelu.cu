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
// kernel adds up what the blocks found, in a fixed order. Few rows: device/gelu_few.cuh.

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
  float* partials;    // [groups, columns], columns being n if `fold`, else row_elements
  int64_t elements, row_elements, rows;
  int64_t n;          // columns repeat every n along a row
  int64_t blocks;     // along a row
  int64_t turns;      // of a block, each kBiasRows rows of a thread
  bool fp32_bias;
  bool bias_vectors;
  bool fold;          // a row is one block's: add its repetitions up at once
};

// Of 4,096, 768, 1,000, 16,384 and 262,144 columns in bf16, us: blocks of 64 rows, 8 bytes a thread, 281, 280, 283, 287, 284;
// of 32 rows 294, 296, 299, 304, 294; of 128 287, 286, 291, 288, 291; 256 threads with 64 rows 290, 291, 296, 297, 293; 16
// bytes a thread 292 and more; blocks that stay, the next rows on their way, 291, 290, 297, 293, 289.
constexpr int kBiasThreads = 512;
constexpr int kBiasBlocks = 2;      // a multiprocessor holds at once
constexpr int kBiasRows = 4;        // of a thread in flight
constexpr int kBiasBlockRows = 64;  // of a block, in all turns
constexpr int kAcross = 64;         // threads of a block along a row,
constexpr int kAcrossOdd = 256;     // and along rows that do not begin at lines of the cache: the longer, the fewer are shared

// ---- kernels ----

template <class Activation, class T, int kWide>
__global__ void __launch_bounds__(kBiasThreads, kBiasBlocks) gelu_bias_gradients(const BiasGradients a) {
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
#pragma unroll 1
  for (int64_t turn = 0; turn < a.turns; ++turn, at += kBiasRows * step) {
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
  if constexpr (kWide > 1) {
    const int64_t end = (a.rows - 1) * a.row_elements + first;
    if (mine && group == 0 && threadIdx.y == 0 && end < a.elements && end + kWide > a.elements) {
      float grad[kWide], value[kWide], result[kWide];
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        const bool there = end + i < a.elements;
        grad[i] = there ? to_float(grad_out[end + i]) : 0.f;
        value[i] = there ? to_float(x[end + i]) : 0.f;
      }
      gradient(grad, value, result);
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        if (a.grad_x && end + i < a.elements) grad_x[end + i] = from_float<T>(result[i]);
      }
    }
  }

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

// The same beside a bias's gradient. Odd rows that would end with a line only many blocks further on are so many together as
// fill one block, whose sums are a row's then: bf16 and fp32 of 31 elements read 0.944 and 0.946 of the copy bandwidth, and by
// lines 0.849 and 0.912; half as many 0.912, twice 0.932 and 0.936.
template <class T>
int64_t joined_in_block(int64_t n, int wide) {
  const int64_t rows = joined<T>(n, wide), most = int64_t(kAcross) * wide;  // elements
  if (n % 2 == 0 || n * rows <= int64_t(kAcrossOdd) * wide) return rows;
  int64_t least = 1;
  while (least < wide && n * least % wide != 0) least *= 2;
  const int64_t filled = most / (n * least) * least;
  return n * filled * 8 >= most * 7 ? filled : rows;
}

// The grid of the kernel with the bias's gradient, and what it leaves behind.
struct BiasPlan {
  int64_t row_elements = 0, rows = 0;
  int64_t across = kWarp;  // threads of a block along a row
  int64_t blocks = 0;      // along a row
  int64_t turns = 0;
  int64_t groups = 0;      // of rows, each for blocks of its own
  bool fold = false;
  int64_t partial_rows(int64_t n) const { return groups * (fold ? 1 : row_elements / n); }
};

template <class T>
BiasPlan plan_bias(int64_t rows, int64_t n, int wide, const Device& device) {
  constexpr int64_t kLine = 128;
  BiasPlan plan;
  plan.row_elements = n * joined_in_block<T>(n, wide);
  plan.rows = divide_up(rows * n, plan.row_elements);
  // The widest blocks that leave few threads without a position: they read the longest runs of memory.
  const int64_t positions = divide_up(plan.row_elements, wide);
  const int64_t widest = plan.row_elements * int64_t(sizeof(T)) % kLine == 0 ? kAcross : kAcrossOdd;
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (int64_t across = widest; across >= kWarp; across /= 2) {
    const int64_t laid = divide_up(positions, across) * across;
    if (laid + positions / 16 < fewest) fewest = laid, plan.across = across;
  }
  plan.blocks = divide_up(positions, plan.across);
  plan.fold = plan.blocks == 1;
  const int64_t turn = kBiasThreads / plan.across * kBiasRows;  // rows of a block at a time
  plan.turns = std::max<int64_t>(1, kBiasBlockRows / turn);
  // Fewer rows a block where there would not be one for each place.
  const int64_t places = int64_t(device.processors) * kBiasBlocks;
  while (plan.turns > 1 && plan.blocks * divide_up(plan.rows, plan.turns * turn) < places) plan.turns /= 2;
  plan.groups = divide_up(plan.rows, plan.turns * turn);
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
  constexpr int kSize = kVector<T>, kHalf = kHalfVector<T>;
  const auto all_keep_to = [&](int bytes) {
    return offset_in_vector(a.grad_out) % bytes == 0 && offset_in_vector(a.x) % bytes == 0 &&
           offset_in_vector(a.grad_x) % bytes == 0;
  };
  const FewBiasPlan few = all_keep_to(16) ? plan_few_bias(rows, a.n, kSize, device) : FewBiasPlan{};
  if (few.threads > 0) {
    const bool bias_vectors = whole_vectors(a.bias, a.fp32_bias, a.n, kSize);
    const FewBiasGradients of_few{a.grad_out, a.x,        a.bias,      a.grad_x,    grad_bias,
                                  rows,       a.n,        few.across,  a.fp32_bias, bias_vectors};
    return launch(gelu_bias_gradients_few<Activation, T>, of_few, few.blocks, dim3(unsigned(few.threads)), 0, 1, stream,
                  device.clusters);
  }
  const bool vectors = all_keep_to(8);
  const int wide = vectors ? kHalf : 1;
  const BiasPlan plan = plan_bias<T>(rows, a.n, wide, device);
  a.elements = rows * a.n, a.row_elements = plan.row_elements, a.rows = plan.rows, a.fold = plan.fold;
  a.blocks = plan.blocks, a.turns = plan.turns;
  a.bias_vectors = whole_vectors(a.bias, a.fp32_bias, a.n, wide);
  const auto kernel = vectors ? gelu_bias_gradients<Activation, T, kHalf> : gelu_bias_gradients<Activation, T, 1>;
  const int error = launch(kernel, a, plan.blocks * plan.groups,
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
    for (const int wide : {1, kHalfVector<T>}) most = std::max(most, plan_bias<T>(rows, n, wide, device).partial_rows(n));
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
