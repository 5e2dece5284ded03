// What belongs to the cross-entropy beside its main kernel: the gradient from statistics that are known, the sums over
// rows, and the scaling of a gradient that was written in the forward pass.
//
// Moves: the gradient reads the logits and writes as much; the scaling reads and writes the rows whose factor is not 1;
// the sums read a few bytes a row. Limit: HBM bandwidth, and for the sums latency.
//
// Threads: kHeld 16-byte vectors of one row each, side by side with those of their neighbours. Sums are in double, by a
// block over neighbouring rows and then by one block over the blocks: the same bits each run.

#include "cross_entropy.cuh"
#include "device/overlap.cuh"

namespace fuseline {
namespace {

constexpr int kBlock = 256;
constexpr int kHeld = 4;
constexpr int kScaling = 6;  // blocks of scale_rows that a multiprocessor holds

// Blocks of (threads of a row, rows); a long row is divided among `chunks` blocks, neighbours in the grid.
struct Tiling {
  int threads, rows;
  int64_t chunks, grid;
};

template <class T>
Tiling tile(int64_t rows, int64_t n) {
  Tiling tiling;
  const int64_t vectors = divide_up(n + kVector<T> - 1, kVector<T>);
  tiling.threads = power_of_two_from(std::min<int64_t>(kBlock, divide_up(vectors, kHeld)));
  tiling.rows = kBlock / tiling.threads;
  tiling.chunks = divide_up(vectors, int64_t(tiling.threads) * kHeld);
  tiling.grid = divide_up(rows, tiling.rows) * tiling.chunks;
  return tiling;
}

// The row of this thread in a tile, and its first element there, as far as the row's alignment lets it.
template <class T>
__device__ __forceinline__ void locate(uint32_t tile, int64_t chunks, int64_t& row, int64_t& first) {
  const uint32_t block = tile / uint32_t(chunks);
  const uint32_t chunk = tile - block * uint32_t(chunks);
  row = int64_t(block) * blockDim.y + threadIdx.y;
  first = (int64_t(chunk) * kHeld * blockDim.x + threadIdx.x) * kVector<T>;
}

struct Backward {
  CrossEntropy of;
  int64_t chunks;
};

struct ScaleRows {
  void* x;
  const float* factors;
  bool one_factor;
  int64_t rows, n, chunks, tiles;
};

struct SumRows {
  const float* loss;
  const void* target;
  const float* weight;
  double2* partials;  // of each block, of loss and of weight
  float* sum;
  float* total;
  int64_t rows, n, ignore_index;
  bool int32_targets, mean;
};

// ---- kernels ----

template <class T>
__global__ void __launch_bounds__(kBlock) cross_entropy_backward(const Backward backward) {
  let_next_start();
  wait_for_earlier();
  const CrossEntropy& a = backward.of;
  constexpr int kSize = kVector<T>;
  const int64_t step = int64_t(blockDim.x) * kSize;
  int64_t row, first;
  locate<T>(blockIdx.x, backward.chunks, row, first);
  if (row >= a.rows) return;
  const T* x = static_cast<const T*>(a.logits) + row * a.width;
  T* const grad = static_cast<T*>(a.grad) + row * a.width;
  first -= elements_into_vector(x);
  uint4 raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) raw[k] = load_vector<T, false>(x, first + k * step, a.width, true);
  const int64_t target = target_of(a, row);
  const bool ignored = is_ignored(a, target);
  const float2 known = a.statistics[row];
  RowGradient gradient{0.f, kInfinity - kInfinity, 0.f, 0.f};
  if (!ignored && is_column(a, target)) {
    gradient = row_gradient(a, scale_of(a, row), target, known.x, known.y, logf(known.y));
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    float z[kSize];
    scores_of<T>(a, raw[k], first + k * step, z);
    gradient_of<T>(a, gradient, target, first + k * step, z);
    if (ignored) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) z[i] = 0.f;
    }
    store_vector<T, false>(grad, first + k * step, a.width, a.grad_vectors, z);
  }
}

// Blocks stay and take tile after tile: the factor of a mean's gradient mostly is 1, and a block for each tile would take
// 30 us of 8,192 x 50,304 to see so.
template <class T>
__global__ void __launch_bounds__(kBlock) scale_rows(const ScaleRows a) {
  let_next_start();
  wait_for_earlier();
  constexpr int kSize = kVector<T>;
  const int64_t step = int64_t(blockDim.x) * kSize;
  if (a.one_factor && a.factors[0] == 1.f) return;
  for (int64_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    int64_t row, first;
    locate<T>(uint32_t(tile), a.chunks, row, first);
    if (row >= a.rows) continue;
    const float factor = a.factors[a.one_factor ? 0 : row];
    if (factor == 1.f) continue;
    T* const x = static_cast<T*>(a.x) + row * a.n;
    first -= elements_into_vector(x);
    uint4 raw[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) raw[k] = load_vector<T, false>(x, first + k * step, a.n, true);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float values[kSize];
      unpack<T>(raw[k], values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] *= factor;
      store_vector<T, false>(x, first + k * step, a.n, true, values);
    }
  }
}

constexpr int kSumBlock = 1024;
constexpr int64_t kSumRows = 8192;  // rows of a block
constexpr int64_t kMostSums = 64;

__device__ __forceinline__ double2 add(double2 a, double2 b) { return make_double2(a.x + b.x, a.y + b.y); }

__device__ __forceinline__ double2 warp_sum(double2 mine) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    mine = add(mine, make_double2(from_lane(mine.x, step), from_lane(mine.y, step)));
  }
  return mine;
}

__device__ __forceinline__ double warp_sum(double mine) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) mine += from_lane(mine, step);
  return mine;
}

__device__ __forceinline__ double sum_of_counts(double count) { return warp_sum(count); }
__device__ __forceinline__ int sum_of_counts(int count) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, count);
#else
  return count;
#endif
}

__device__ __forceinline__ void keep_sums(const SumRows& a, double2 sum) {
  if (a.sum) *a.sum = float(a.mean ? sum.x / sum.y : sum.x);
  if (a.total) *a.total = float(sum.y);
}

// Targets, which are there before what makes the losses has ended, are counted meanwhile: as integers without weights.
template <bool kWeighted>
__global__ void __launch_bounds__(kSumBlock) sum_rows(const SumRows a) {
  static_assert(kSumBlock == kWarp * kWarp);
  constexpr int kEach = int(kSumRows) / kSumBlock;
  using Count = std::conditional_t<kWeighted, double, int>;
  __shared__ double sums[kWarp];
  __shared__ Count counts[kWarp];
  const int thread = int(threadIdx.x);
  const int64_t each = (a.rows + gridDim.x - 1) / gridDim.x;
  const int64_t begin = blockIdx.x * each;
  const int64_t end = begin + each < a.rows ? begin + each : a.rows;
  if (!a.loss) wait_for_earlier();
  let_next_start();
  Count count = 0;
#pragma unroll 1
  for (int64_t first = begin + thread; first < end; first += kSumRows) {
#pragma unroll
    for (int u = 0; u < kEach; ++u) {
      const int64_t row = first + u * kSumBlock;
      if (row >= end) continue;
      const int64_t target = a.int32_targets ? int64_t(static_cast<const int32_t*>(a.target)[row])
                                             : static_cast<const int64_t*>(a.target)[row];
      if (target == a.ignore_index) continue;
      if constexpr (kWeighted) {
        count += target >= 0 && target < a.n ? a.weight[target] : kInfinity - kInfinity;
      } else {
        ++count;
      }
    }
  }
  double sum = 0.;
  if (a.loss) {
    wait_for_earlier();
#pragma unroll 1
    for (int64_t first = begin + thread; first < end; first += kSumRows) {
      float loss[kEach];
#pragma unroll
      for (int u = 0; u < kEach; ++u) loss[u] = first + u * kSumBlock < end ? a.loss[first + u * kSumBlock] : 0.f;
      double two[2] = {0., 0.};
#pragma unroll
      for (int u = 0; u < kEach; ++u) two[u % 2] += double(loss[u]);
      sum += two[0] + two[1];
    }
    sum = warp_sum(sum);
  }
  count = sum_of_counts(count);
  if (thread % kWarp == 0) sums[thread / kWarp] = sum, counts[thread / kWarp] = count;
  __syncthreads();
  if (thread >= kWarp) return;
  const double2 whole = make_double2(warp_sum(sums[thread]), double(sum_of_counts(counts[thread])));
  if (thread > 0) return;
  if (gridDim.x == 1) {
    keep_sums(a, whole);
  } else {
    a.partials[blockIdx.x] = whole;
  }
}

__global__ void __launch_bounds__(kWarp) sum_partials(const SumRows a, int count) {
  double2 sum = make_double2(0., 0.);
  for (int i = threadIdx.x; i < count; i += kWarp) sum = add(sum, a.partials[i]);
  sum = warp_sum(sum);
  if (threadIdx.x == 0) keep_sums(a, sum);
}

// ---- launchers ----

int64_t sum_blocks(int64_t rows) { return std::max<int64_t>(1, std::min(kMostSums, divide_up(rows, kSumRows))); }

}  // namespace
}  // namespace fuseline

int fuseline_cross_entropy_backward(const void* logits, const void* target, int target_bytes, const float* weight,
                                    const float* weight_sum, const float* total, const float* statistics,
                                    const float* grad_out, int one_grad_out, void* grad, int64_t rows, int64_t n,
                                    int64_t width, int64_t ignore_index, double label_smoothing, double soft_cap,
                                    double z_loss, int dtype, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0 || width < n) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype) || (target_bytes != 4 && target_bytes != 8)) return FUSELINE_UNSUPPORTED;
  if (rows == 0 || width == 0) return 0;
  Backward backward{};
  CrossEntropy& a = backward.of;
  a.logits = logits, a.target = target, a.weight = weight, a.weight_sum = weight_sum, a.total = total;
  a.statistics = reinterpret_cast<float2*>(const_cast<float*>(statistics)), a.grad_out = grad_out, a.grad = grad;
  a.rows = rows, a.n = n, a.width = width, a.ignore_index = ignore_index;
  a.label_smoothing = float(label_smoothing), a.z_loss = float(z_loss);
  a.soft_cap = float(soft_cap), a.inverse_cap = soft_cap > 0 ? float(1 / soft_cap) : 0.f;
  a.int32_targets = target_bytes == 4, a.one_grad_out = one_grad_out != 0;
  a.grad_vectors = offset_in_vector(logits) == offset_in_vector(grad);
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const Tiling tiling = tile<T>(rows, width);
    backward.chunks = tiling.chunks;
    return launch(cross_entropy_backward<T>, backward, tiling.grid, dim3(tiling.threads, tiling.rows), 0, 1, stream,
                  device.clusters);
  });
}

size_t fuseline_cross_entropy_reduce_workspace(int64_t rows) {
  const int64_t blocks = fuseline::sum_blocks(rows);
  return blocks > 1 ? size_t(blocks) * sizeof(double2) : 0;
}

int fuseline_cross_entropy_reduce(const float* loss, const void* target, int target_bytes, const float* weight,
                                  float* sum, float* total, void* workspace, int64_t rows, int64_t n,
                                  int64_t ignore_index, int mean, void* stream) {
  using namespace fuseline;
  if (rows < 0) return FUSELINE_BAD_SIZE;
  if (target_bytes != 4 && target_bytes != 8) return FUSELINE_UNSUPPORTED;
  SumRows a{};
  a.loss = loss, a.target = target, a.weight = weight, a.sum = sum, a.total = total;
  a.partials = static_cast<double2*>(workspace);
  a.rows = rows, a.n = n, a.ignore_index = ignore_index, a.int32_targets = target_bytes == 4, a.mean = mean != 0;
  Device device;
  const cudaError_t failed = current_device(device);
  if (failed != cudaSuccess) return int(failed);
  const int64_t blocks = sum_blocks(rows);
  const auto kernel = weight ? sum_rows<true> : sum_rows<false>;
  const int error = launch(kernel, a, blocks, dim3(kSumBlock), 0, 1, stream, device.clusters);
  if (error || blocks == 1) return error;
  sum_partials<<<1, kWarp, 0, static_cast<cudaStream_t>(stream)>>>(a, int(blocks));
  return int(cudaGetLastError());
}

int fuseline_scale_rows(void* x, const float* factors, int one_factor, int64_t rows, int64_t n, int dtype,
                        void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype)) return FUSELINE_UNSUPPORTED;
  if (rows == 0 || n == 0) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const Tiling tiling = tile<T>(rows, n);
    const ScaleRows a{x, factors, one_factor != 0, rows, n, tiling.chunks, tiling.grid};
    const int64_t blocks = std::min<int64_t>(tiling.grid, int64_t(device.processors) * kScaling);
    return launch(scale_rows<T>, a, blocks, dim3(tiling.threads, tiling.rows), 0, 1, stream,
                  device.clusters);
  });
}
