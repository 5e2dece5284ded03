// sums[c] = the sum of x[r, c] over the rows r: the gradient of a linear layer's bias. Where ReLU and dropout follow that
// layer, x is made on the way: grad_y / (1 - p) where y is not zero.
//
// Moves: x read once (grad_y and y read once, x written once), and fp32 rows of partial sums, one for each group of rows,
// written and read. Does: an addition an element, in fp32. Limit: HBM bandwidth.
//
// Threads: a block has up to 32 accesses of 16 bytes side by side and the rows of one group; its threads take every
// so-manieth row, four at a time. Their sums meet in shared memory, and a second kernel adds up those of the groups
// (activations/partials.cu), all in a fixed order. There are as many groups as fill the device once.
#include "activations/partials.h"
#include "device/launch.cuh"
#include "device/overlap.cuh"
#include "device/philox.cuh"
#include "fuseline_dropout.h"

namespace fuseline {
namespace {

constexpr int kSumThreads = 512;
constexpr int kSumBlocks = 2;  // a multiprocessor holds at once
constexpr int kSumRows = 4;    // of a thread in flight
constexpr int64_t kMostPartials = 1024;  // rows of fp32 that are added up as partial sums are

struct ColumnSums {
  const void* x;  // or grad_y
  float* partials;  // [groups, n]
  int64_t rows, n;
  int64_t blocks;      // along a row
  int64_t group_rows;  // of a block
  const void* y;       // what dropout after ReLU returned, else null, as is
  void* grad_x;        // its gradient
  float scale;         // of what was kept
};

struct ColumnSumsPlan {
  int across = 0;  // threads of a block along a row
  int64_t blocks = 0, groups = 0, group_rows = 0;
};

ColumnSumsPlan plan_column_sums(int64_t rows, int64_t n, int wide, const Device& device) {
  ColumnSumsPlan plan;
  const int64_t accesses = divide_up(n, wide);
  plan.across = int(std::min<int64_t>(kWarp, power_of_two_from(accesses)));
  plan.blocks = divide_up(accesses, plan.across);
  const int64_t down = kSumThreads / plan.across, places = int64_t(device.processors) * kSumBlocks;
  const int64_t groups = std::min(std::max<int64_t>(1, places / plan.blocks), divide_up(rows, down));
  plan.group_rows = divide_up(rows, groups);
  plan.groups = divide_up(rows, plan.group_rows);
  return plan;
}

// kWide elements, zero where there are none.
template <class T, int kWide>
struct Access {
  uint4 raw;
  __device__ __forceinline__ void load(const T* from, bool there) {
    raw = make_uint4(0, 0, 0, 0);
    if (there) raw = load_once(from);
  }
  __device__ __forceinline__ void add_to(float (&sums)[kWide]) const {
    float values[kWide];
    unpack<T>(raw, values);
#pragma unroll
    for (int i = 0; i < kWide; ++i) sums[i] += values[i];
  }
  __device__ __forceinline__ void drop(const Access& kept, float scale) {
    float values[kWide], others[kWide];
    unpack<T>(raw, values);
    unpack<T>(kept.raw, others);
#pragma unroll
    for (int i = 0; i < kWide; ++i) values[i] = others[i] == 0.f ? 0.f : values[i] * scale;
    raw = pack<T>(values);
  }
};

template <class T>
struct Access<T, 1> {
  float value;
  __device__ __forceinline__ void load(const T* from, bool there) { value = there ? to_float(*from) : 0.f; }
  __device__ __forceinline__ void add_to(float (&sums)[1]) const { sums[0] += value; }
};

template <class T, int kWide, bool kDropped>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks) column_sums(const ColumnSums a) {
  __shared__ float shared[kSumThreads * kWide];  // [blockDim.y][kWide][blockDim.x]
  let_next_start();
  const int across = int(blockDim.x), down = int(blockDim.y), width = across * kWide;
  const int64_t group = blockIdx.x / a.blocks, block = blockIdx.x - group * a.blocks;
  const int64_t first = (block * across + threadIdx.x) * kWide;
  const int64_t end = first < a.n ? min(a.rows, (group + 1) * a.group_rows) : 0;
  int64_t row = group * a.group_rows + threadIdx.y;
  int64_t at = row * a.n + first;
  const T* const x = static_cast<const T*>(a.x);
  const int64_t step = down * a.n;
  wait_for_earlier();
  float sums[kWide] = {};
#pragma unroll 1
  for (; row < end; row += kSumRows * down, at += kSumRows * step) {
    Access<T, kWide> accesses[kSumRows], kept[kSumRows];
#pragma unroll
    for (int u = 0; u < kSumRows; ++u) {
      accesses[u].load(x + at + u * step, row + u * down < end);
      if constexpr (kDropped) kept[u].load(static_cast<const T*>(a.y) + at + u * step, row + u * down < end);
    }
#pragma unroll
    for (int u = 0; u < kSumRows; ++u) {
      if constexpr (kDropped) {
        if (row + u * down >= end) continue;
        accesses[u].drop(kept[u], a.scale);
        *reinterpret_cast<uint4*>(static_cast<T*>(a.grad_x) + at + u * step) = accesses[u].raw;
      }
      accesses[u].add_to(sums);
    }
  }
#pragma unroll
  for (int i = 0; i < kWide; ++i) shared[threadIdx.y * width + i * across + threadIdx.x] = sums[i];
  __syncthreads();
  const int64_t begin = block * width;
  for (int c = int(threadIdx.y) * across + int(threadIdx.x); c < width && begin + c < a.n; c += kSumThreads) {
    float sum = 0.f;
    for (int y = 0; y < down; ++y) sum += shared[y * width + c % kWide * across + c / kWide];
    a.partials[group * a.n + begin + c] = sum;
  }
}

template <class T>
bool in_vectors(int64_t n, const void* x) {
  return n % kVector<T> == 0 && (!x || offset_in_vector(x) == 0);
}

// A tensor that begins anywhere is read element by element, in no more groups.
template <class T>
ColumnSumsPlan plan_for(int64_t rows, int64_t n, const void* x, const Device& device) {
  return plan_column_sums(rows, n, in_vectors<T>(n, x) ? kVector<T> : 1, device);
}

int run(void (*kernel)(ColumnSums), const ColumnSums& a, const ColumnSumsPlan& plan, void* sums, int dtype,
        const Device& device, void* stream) {
  const dim3 block(unsigned(plan.across), unsigned(kSumThreads / plan.across));
  const int failed = launch(kernel, a, plan.blocks * plan.groups, block, 0, 1, stream, device.clusters);
  return failed ? failed : run_add_partials(a.partials, plan.groups, a.n, sums, dtype, device, stream);
}

bool are_partials(int64_t rows, int dtype) { return dtype == FUSELINE_FLOAT32 && rows <= kMostPartials; }

}  // namespace
}  // namespace fuseline

size_t fuseline_column_sums_workspace(int64_t rows, int64_t n, int dtype) {
  using namespace fuseline;
  Device device;
  if (rows <= 0 || n <= 0 || are_partials(rows, dtype) || current_device(device) != cudaSuccess) return 0;
  int64_t groups = 0;
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    groups = std::max(plan_for<T>(rows, n, nullptr, device).groups, plan_column_sums(rows, n, 1, device).groups);
    return 0;
  });
  return size_t(groups * n) * sizeof(float);
}

int fuseline_column_sums(const void* x, void* sums, void* workspace, int64_t rows, int64_t n, int dtype, int sums_dtype,
                         void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype) || !known_dtype(sums_dtype)) return FUSELINE_UNSUPPORTED;
  if (n == 0) return 0;
  if (rows == 0) {
    const size_t bytes = size_t(n) * (sums_dtype == FUSELINE_FLOAT32 ? 4 : 2);
    return int(cudaMemsetAsync(sums, 0, bytes, static_cast<cudaStream_t>(stream)));
  }
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  if (are_partials(rows, dtype)) {
    return run_add_partials(static_cast<const float*>(x), rows, n, sums, sums_dtype, device, stream);
  }
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const ColumnSumsPlan plan = plan_for<T>(rows, n, x, device);
    float* const partials = static_cast<float*>(workspace);
    const ColumnSums a{x, partials, rows, n, plan.blocks, plan.group_rows};
    const auto kernel = in_vectors<T>(n, x) ? column_sums<T, kVector<T>, false> : column_sums<T, 1, false>;
    return run(kernel, a, plan, sums, sums_dtype, device, stream);
  });
}

int fuseline_relu_dropout_backward_sums(const void* grad_y, const void* y, void* grad_x, void* sums, void* workspace,
                                        int64_t rows, int64_t n, double p, int dtype, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype) || !(p >= 0 && p <= 1)) return FUSELINE_UNSUPPORTED;
  if (rows == 0 || n == 0 || are_partials(rows, dtype)) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if (!in_vectors<T>(n, grad_y) || !in_vectors<T>(n, y) || !in_vectors<T>(n, grad_x)) return int(FUSELINE_UNSUPPORTED);
    const ColumnSumsPlan plan = plan_column_sums(rows, n, kVector<T>, device);
    float* const partials = static_cast<float*>(workspace);
    const ColumnSums a{grad_y, partials, rows, n, plan.blocks, plan.group_rows, y, grad_x, dropout_of(nullptr, p).scale};
    return run(column_sums<T, kVector<T>, true>, a, plan, sums, dtype, device, stream);
  });
}
