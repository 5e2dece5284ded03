// grad_x = scale * y * (grad_out - sum(grad_out * y) / sum(y)) over each row.
//
// The sum of y is 1 but for the rounding of y to 16 bits, which matters where one key takes nearly all: with y = 1 and
// 6e-6, and without the division, its gradient would be off by 6e-6 * grad_out, as much as the gradient itself. The y
// of fp32 rows is not divided, but the products are summed in double.
//
// Moves: grad_out and y read once, grad_x written once. Does: 5 operations an element. Limit: HBM bandwidth.
//
// Threads: as in softmax_forward.cu, but both rows stay in registers as they came from memory (two arrays of fp32
// would not leave room for enough threads) and are widened twice. Long rows come through a ring in shared memory to
// blocks that stay (staying.cuh). Rows longer than a cluster can hold are read twice.

#include "device/launch.cuh"
#include "device/staying.cuh"

namespace fuseline {
namespace {

struct SoftmaxBackward {
  const void* grad_out;
  const void* y;
  void* grad_x;
  int64_t rows, n;
  float scale;
  bool y_vectors;       // y stands in its 16-byte vectors as grad_out does
  bool grad_x_vectors;  // and so does grad_x
  int cluster;
  int stages;
};

// sum(grad_out * y), and sum(y) for 16-bit rows.
template <class T>
using Sums = std::conditional_t<sizeof(T) == 4, double, float2>;

template <class T>
__device__ __forceinline__ Sums<T> sums_of(const uint4& grad_raw, const uint4& y_raw) {
  float grad[kVector<T>], y[kVector<T>];
  unpack<T>(grad_raw, grad);
  unpack<T>(y_raw, y);
  Sums<T> sums{};
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    if constexpr (sizeof(T) == 4) {
      sums += double(grad[i]) * double(y[i]);
    } else {
      sums.x += grad[i] * y[i];
      sums.y += y[i];
    }
  }
  return sums;
}

// What is taken off grad_out. A row of zeros has no sum, and no gradient either.
__device__ __forceinline__ float mean_of(double sum) { return float(sum); }
__device__ __forceinline__ float mean_of(float2 sums) { return sums.y == 0.f ? 0.f : sums.x / sums.y; }

template <class T>
__device__ __forceinline__ void gradient(const uint4& grad_raw, const uint4& y_raw, float mean, float scale,
                                         float (&result)[kVector<T>]) {
  float grad[kVector<T>], y[kVector<T>];
  unpack<T>(grad_raw, grad);
  unpack<T>(y_raw, y);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) result[i] = scale * y[i] * (grad[i] - mean);
}

// ---- kernels ----

template <class T, int kHeld, bool kAligned, bool kOneWarp>
__global__ void __launch_bounds__(most_threads(kOneWarp), least_blocks(kOneWarp, 8 * kHeld))
    softmax_backward_rows(const SoftmaxBackward a) {
  __shared__ Sums<T> shared[2 * kMaxStates];
  Group<Sums<T>, kOneWarp> group(shared, a.cluster);
  constexpr int kSize = kVector<T>;
  const int n = int(a.n);
  const int step = group.threads * kSize;
    const int64_t row = int64_t(group.first) * blockDim.y + threadIdx.y;
  const int inside = row < a.rows ? n : 0;
  const T* grad_out = static_cast<const T*>(a.grad_out) + row * a.n;
  const T* y = static_cast<const T*>(a.y) + row * a.n;
  T* grad_x = static_cast<T*>(a.grad_x) + row * a.n;
  const int head = kAligned ? 0 : elements_into_vector(grad_out);
  int start = (group.rank * kHeld * group.threads + group.lane) * kSize - head;
  uint4 grad_raw[kHeld], y_raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    grad_raw[k] = load_vector<T, kAligned>(grad_out, start + k * step, inside, true);
    y_raw[k] = load_vector<T, kAligned>(y, start + k * step, inside, a.y_vectors);
  }
  Sums<T> sums{};
#pragma unroll
  for (int k = 0; k < kHeld; ++k) sums = plus(sums, sums_of<T>(grad_raw[k], y_raw[k]));
  const float mean = mean_of(sum_over_row(sums, group));
  forget(start);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) forget(grad_raw[k]), forget(y_raw[k]);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    float result[kSize];
    gradient<T>(grad_raw[k], y_raw[k], mean, a.scale, result);
    store_vector<T, kAligned>(grad_x, start + k * step, inside, a.grad_x_vectors, result);
  }
}

// Long rows, in blocks that stay. All three tensors stand in their 16-byte vectors alike.
template <class T, int kHeld>
__global__ void __launch_bounds__(kMostThreads, 1) softmax_backward_staying(const SoftmaxBackward a) {
  extern __shared__ uint4 ring[];
  __shared__ Sums<T> shared[2 * kMaxStates];
  Group<Sums<T>> group(shared, a.cluster);
  constexpr int kSize = kVector<T>;
  const int n = int(a.n);
  const int threads = group.threads;
  const int step = threads * kSize;
  const int place = (group.rank * kHeld * threads + group.lane) * kSize;
  const int64_t row_step = gridDim.x / a.cluster;
  const T* const grad_out = static_cast<const T*>(a.grad_out);
  const T* const y = static_cast<const T*>(a.y);
  const auto fetch = [&](int64_t row, int stage) {
    if (row < a.rows) {
      uint4* const slots = ring + stage * 2 * kHeld * threads + group.lane;
      const int start = place - elements_into_vector(grad_out + row * a.n);
      fetch_vectors<T, kHeld>(slots, threads, grad_out + row * a.n, start, step, n);
      fetch_vectors<T, kHeld>(slots + kHeld * threads, threads, y + row * a.n, start, step, n);
    }
    commit_copies();
  };
  for (int stage = 0; stage < a.stages; ++stage) fetch(group.first + stage * row_step, stage);
  int stage = 0;
  for (int64_t row = group.first; row < a.rows; row += row_step) {
    const int start = place - elements_into_vector(grad_out + row * a.n);
    wait_for_oldest(a.stages);
    const uint4* const slots = ring + stage * 2 * kHeld * threads + group.lane;
    uint4 grad_raw[kHeld], y_raw[kHeld];
    take_vectors<T, kHeld>(slots, threads, start, step, n, grad_raw);
    take_vectors<T, kHeld>(slots + kHeld * threads, threads, start, step, n, y_raw);
    Sums<T> sums{};
#pragma unroll
    for (int k = 0; k < kHeld; ++k) sums = plus(sums, sums_of<T>(grad_raw[k], y_raw[k]));
    fetch(row + a.stages * row_step, stage);  // the slots have been read: their values are in the sums
    stage = stage + 1 < a.stages ? stage + 1 : 0;
    const float mean = mean_of(sum_over_row(sums, group));
    T* const grad_x = static_cast<T*>(a.grad_x) + row * a.n;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float result[kSize];
      gradient<T>(grad_raw[k], y_raw[k], mean, a.scale, result);
      store_vector<T, false>(grad_x, start + k * step, n, true, result);
    }
  }
  wait_for_all();
  group.leave();
}

constexpr int kPiece = 4;  // vectors of each row a thread of the streamed kernel has in flight

template <class T>
__global__ void __launch_bounds__(512) softmax_backward_streamed(const SoftmaxBackward a) {
  __shared__ Sums<T> shared[2 * kMaxStates];
  Group<Sums<T>> group(shared, a.cluster);
  constexpr int kSize = kVector<T>;
  const int64_t step = int64_t(group.threads) * kSize;
  const int64_t row = group.first;
  const T* grad_out = static_cast<const T*>(a.grad_out) + row * a.n;
  const T* y = static_cast<const T*>(a.y) + row * a.n;
  T* grad_x = static_cast<T*>(a.grad_x) + row * a.n;
  const int head = elements_into_vector(grad_out);
  const int64_t vectors = (a.n + head + kSize - 1) / kSize;
  const int64_t share = (vectors + group.blocks - 1) / group.blocks;
  const int64_t begin = (share * group.rank + group.lane) * kSize - head;
  const int64_t share_end = share * (group.rank + 1) * kSize - head;
  const int64_t end = share_end < a.n ? share_end : a.n;
  Sums<T> sums{};
  for (int64_t from = begin; from < end; from += kPiece * step) {
    uint4 grad_raw[kPiece], y_raw[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      grad_raw[k] = load_vector<T, false>(grad_out, from + k * step, end, true);
      y_raw[k] = load_vector<T, false>(y, from + k * step, end, a.y_vectors);
    }
#pragma unroll
    for (int k = 0; k < kPiece; ++k) sums = plus(sums, sums_of<T>(grad_raw[k], y_raw[k]));
  }
  const float mean = mean_of(sum_over_row(sums, group));
  for (int64_t from = begin; from < end; from += step) {
    float result[kSize];
    gradient<T>(load_vector<T, false>(grad_out, from, end, true),
                load_vector<T, false>(y, from, end, a.y_vectors), mean, a.scale, result);
    store_vector<T, false>(grad_x, from, end, a.grad_x_vectors, result);
  }
}

// ---- launcher ----

// Four vectors of each row are 32 registers; a block that stays has a multiprocessor to itself, and twice the
// registers.
constexpr int kMostHeld = 4;

template <class T>
auto kernel_for(const RowPlan& plan, bool aligned) -> void (*)(SoftmaxBackward) {
  constexpr int kMost = kMostHeld;
  if (plan.streamed) return softmax_backward_streamed<T>;
  if (plan.stages > 0) {
    if (plan.held == kMost) return softmax_backward_staying<T, kMost>;
    return plan.held == 2 * kMost ? softmax_backward_staying<T, 2 * kMost> : nullptr;
  }
  if (!aligned && plan.held == 1) return softmax_backward_rows<T, 1, false, true>;
  if (!aligned) return softmax_backward_rows<T, kMost, false, false>;
  if (!plan.one_warp) return plan.held == kMost ? softmax_backward_rows<T, kMost, true, false> : nullptr;
  if (plan.held == kMost) return softmax_backward_rows<T, kMost, true, true>;
  if (plan.held == kMost / 2) return softmax_backward_rows<T, kMost / 2, true, true>;
  return plan.held == kMost / 4 ? softmax_backward_rows<T, kMost / 4, true, true> : nullptr;
}

template <class T>
int run(SoftmaxBackward a, const Device& device, void* stream) {
  const int offset = offset_in_vector(a.grad_out);
  a.y_vectors = offset_in_vector(a.y) == offset;
  a.grad_x_vectors = offset_in_vector(a.grad_x) == offset;
  const bool alike = a.y_vectors && a.grad_x_vectors;
  const bool aligned = a.n % kVector<T> == 0 && offset == 0 && alike;
  const RowPlan plan =
      plan_rows(FUSELINE_SOFTMAX_BACKWARD, sizeof(T), a.rows, a.n, aligned, alike, kMostHeld, device);
  a.cluster = plan.cluster;
  const auto kernel = plan.fits ? kernel_for<T>(plan, aligned) : nullptr;
  if (!kernel) return FUSELINE_UNSUPPORTED;
  if (plan.stages > 0 && !plan.streamed) {
    const int shared = 2 * kMaxStates * int(sizeof(Sums<T>));
    return launch_staying(kernel, a, plan, device, 2 * plan.held, shared, a.rows, stream);
  }
  return launch(kernel, a, grid_for(plan, a.rows), dim3(plan.threads, plan.rows), 0, plan.cluster, stream);
}

}  // namespace
}  // namespace fuseline

int fuseline_softmax_backward(const void* grad_out, const void* y, void* grad_x, int64_t rows, int64_t n,
                              double scale, int dtype, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype)) return FUSELINE_UNSUPPORTED;
  if (rows == 0 || n == 0) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  SoftmaxBackward a{};
  a.grad_out = grad_out, a.y = y, a.grad_x = grad_x;
  a.rows = rows, a.n = n, a.scale = float(scale);
  return with_dtype(dtype, [&](auto type) { return run<decltype(type)>(a, device, stream); });
}
