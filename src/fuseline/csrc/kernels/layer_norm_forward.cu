// y = (x - mean) / sqrt(variance + eps) * weight + bias over each row; mean and 1 / sqrt(..) kept for the backward.
//
// Moves: x read once, y written once; weight and bias come from cache. Does: about 8 operations an element. Limit: HBM
// bandwidth.
//
// Threads: a row belongs to a group (group.cuh) of 1 to 32 threads, of a block, or of a cluster, and stays in
// registers as fp32: kHeld 16-byte vectors a thread, those of neighbouring threads side by side. The variance is taken
// about the mean, never as a difference of squares: each warp sums its elements, then their squared distances from its
// own mean; the warps meet once and combine (Chan, Golub, LeVeque 1979). The second pass also sums the distances
// themselves, which takes out what rounding left in the mean. Rows longer than a cluster can hold are read twice.

#include "device/launch.cuh"
#include "device/weights.cuh"

namespace fuseline {
namespace {

struct LayerNormForward {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  float* mean;
  float* rstd;
  int64_t rows, n;
  float eps;
  bool fp32_weights;
  bool y_vectors;  // y stands in its 16-byte vectors as x does
  int cluster;
};

// Mean of `count` elements, and the sum of their squared distances from it.
struct Moments {
  float mean, squares, count;
};

// How many of the elements first .. first + kSize are in 0 .. n.
template <int kSize, class Index>
__device__ __forceinline__ int count_inside(Index first, Index n) {
  const Index below = first < 0 ? -first : 0;
  const Index above = first + kSize > n ? first + kSize - n : 0;
  const Index inside = kSize - below - above;
  return inside > 0 ? int(inside) : 0;
}

// Sums value(i) over the elements of a vector that are inside the row.
template <int kSize, class Index, class Value>
__device__ __forceinline__ void each_inside(Index first, Index n, Value&& value) {
  if (first >= 0 && first + kSize <= n) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) value(i);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i >= 0 && first + i < n) value(i);
    }
  }
}

// Takes out what rounding left in the mean: `distances` is the sum of (x - mean).
__device__ __forceinline__ Moments corrected(float mean, float distances, float squares, float count) {
  const float left = count > 0.f ? distances / count : 0.f;
  const float about_mean = squares - left * distances;
  return {mean + left, about_mean < 0.f ? 0.f : about_mean, count};  // not fmaxf: NaN stays
}

// Moments of the row from those of its warps.
template <bool kOneWarp>
__device__ __forceinline__ Moments meet(const Moments& warp, int64_t n, Group<Moments, kOneWarp>& group) {
  if (group.in_one_warp()) return warp;
  const Moments* states = group.publish(warp);
  float sum = 0.f;
#pragma unroll 1
  for (int i = group.lane % kWarp; i < group.states; i += kWarp) sum += states[i].count * states[i].mean;
  const float count = float(n);
  const float mean = group.warp_sum(sum) / count;
  float distances = 0.f, squares = 0.f;
#pragma unroll 1
  for (int i = group.lane % kWarp; i < group.states; i += kWarp) {
    const float apart = states[i].mean - mean;
    distances += states[i].count * apart;
    squares += states[i].squares + states[i].count * apart * apart;
  }
  return corrected(mean, group.warp_sum(distances), group.warp_sum(squares), count);
}

// values = (values - mean) * rstd * weight + bias, the elements first .. of the row.
template <class T, bool kAligned, class Index>
__device__ __forceinline__ void normalize(const LayerNormForward& a, Index first, Index n, float mean, float rstd,
                                          float (&values)[kVector<T>]) {
  constexpr int kSize = kVector<T>;
#pragma unroll
  for (int i = 0; i < kSize; ++i) values[i] = (values[i] - mean) * rstd;
  if (kAligned && first >= n) return;
  if (a.weight) {
    float weight[kSize] = {};
    load_weights<T, kAligned>(a.weight, a.fp32_weights, first, n, weight);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] *= weight[i];
  }
  if (a.bias) {
    float bias[kSize] = {};
    load_weights<T, kAligned>(a.bias, a.fp32_weights, first, n, bias);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] += bias[i];
  }
}

__device__ __forceinline__ float rstd_of(const LayerNormForward& a, const Moments& row) {
  return 1.f / sqrtf(row.squares / float(a.n) + a.eps);
}

__device__ __forceinline__ void keep_statistics(const LayerNormForward& a, int64_t row, float mean, float rstd) {
  if (a.mean) a.mean[row] = mean;
  if (a.rstd) a.rstd[row] = rstd;
}

// ---- kernels ----

template <class T, int kHeld, bool kAligned, bool kOneWarp>
__global__ void __launch_bounds__(most_threads(kOneWarp), least_blocks(kOneWarp, kHeld * kVector<T>))
    layer_norm_forward_rows(const LayerNormForward a) {
  __shared__ Moments shared[2 * kMaxStates];
  Group<Moments, kOneWarp> group(shared, a.cluster);
  constexpr int kSize = kVector<T>;
  const int n = int(a.n);
  const int step = group.threads * kSize;
    int64_t row = int64_t(group.first) * blockDim.y + threadIdx.y;
  const int inside = row < a.rows ? n : 0;
  const T* x = static_cast<const T*>(a.x) + row * a.n;
  const int head = kAligned ? 0 : elements_into_vector(x);
  int start = (group.rank * kHeld * group.threads + group.lane) * kSize - head;
  uint4 raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) raw[k] = load_vector<T, kAligned>(x, start + k * step, inside, true);
  float values[kHeld][kSize];
  float sum = 0.f, held = 0.f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    unpack<T>(raw[k], values[k]);  // zeros outside the row
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += values[k][i];
    held += float(count_inside<kSize>(start + k * step, inside));
  }
  const float count = group.in_one_warp() ? float(n) : group.warp_sum(held);
  const float mean = count > 0.f ? group.warp_sum(sum) / count : 0.f;
  float distances = 0.f, squares = 0.f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    each_inside<kSize>(start + k * step, inside, [&](int i) {
      const float apart = values[k][i] - mean;
      distances += apart;
      squares += apart * apart;
    });
  }
  const Moments warp = corrected(mean, group.warp_sum(distances), group.warp_sum(squares), count);
  const Moments whole = meet(warp, a.n, group);
  const float rstd = rstd_of(a, whole);
  if (row >= a.rows) return;
  forget(start);
  forget(row);
  if (group.lane == 0 && group.rank == 0) keep_statistics(a, row, whole.mean, rstd);
  T* y = static_cast<T*>(a.y) + row * a.n;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    normalize<T, kAligned>(a, start + k * step, n, whole.mean, rstd, values[k]);
    store_vector<T, kAligned>(y, start + k * step, n, a.y_vectors, values[k]);
  }
}

constexpr int kPiece = 4;  // vectors a thread of the streamed kernel has in flight

template <class T>
__global__ void __launch_bounds__(512) layer_norm_forward_streamed(const LayerNormForward a) {
  __shared__ Moments shared[2 * kMaxStates];
  Group<Moments> group(shared, a.cluster);
  constexpr int kSize = kVector<T>;
  const int64_t step = int64_t(group.threads) * kSize;
  const int64_t row = group.first;
  const T* x = static_cast<const T*>(a.x) + row * a.n;
  T* y = static_cast<T*>(a.y) + row * a.n;
  const int head = elements_into_vector(x);
  const int64_t vectors = (a.n + head + kSize - 1) / kSize;
  const int64_t share = (vectors + group.blocks - 1) / group.blocks;
  const int64_t begin = (share * group.rank + group.lane) * kSize - head;
  const int64_t share_end = share * (group.rank + 1) * kSize - head;
  const int64_t end = share_end < a.n ? share_end : a.n;
  Moments mine{0.f, 0.f, 0.f};
  for (int64_t from = begin; from < end; from += kPiece * step) {
    float values[kPiece][kSize];
    float sum = 0.f, count = 0.f;
    uint4 raw[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) raw[k] = load_vector<T, false>(x, from + k * step, end, true);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      unpack<T>(raw[k], values[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum += values[k][i];
      count += float(count_inside<kSize>(from + k * step, end));
    }
    const float mean = sum / count;
    float squares = 0.f;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      each_inside<kSize>(from + k * step, end, [&](int i) {
        const float apart = values[k][i] - mean;
        squares += apart * apart;
      });
    }
    const float apart = mean - mine.mean;
    const float total = mine.count + count;
    mine.squares += squares + apart * apart * (mine.count * count / total);
    mine.mean += apart * (count / total);
    mine.count = total;
  }
  const float count = group.warp_sum(mine.count);
  const float mean = count > 0.f ? group.warp_sum(mine.count * mine.mean) / count : 0.f;
  const float apart = mine.mean - mean;
  const float distances = group.warp_sum(mine.count * apart);
  const float squares = group.warp_sum(mine.squares + mine.count * apart * apart);
  const Moments whole = meet(corrected(mean, distances, squares, count), a.n, group);
  const float rstd = rstd_of(a, whole);
  if (group.lane == 0 && group.rank == 0) keep_statistics(a, row, whole.mean, rstd);
  for (int64_t from = begin; from < end; from += step) {
    float values[kSize];
    unpack<T>(load_vector<T, false>(x, from, end, true), values);
    normalize<T, false>(a, from, end, whole.mean, rstd, values);
    store_vector<T, false>(y, from, end, a.y_vectors, values);
  }
}

// ---- launcher ----

// Eight threads side by side read whole 128-byte lines; 32 values a thread (held = 32 / kVector) leave room for
// 1024 threads a multiprocessor.
template <class T>
constexpr RowTuning kTuning = {32 / kVector<T>, 8};

template <class T>
auto kernel_for(const RowPlan& plan, bool aligned) -> void (*)(LayerNormForward) {
  constexpr int kMost = kTuning<T>.held;
  if (plan.streamed) return layer_norm_forward_streamed<T>;
  if (!aligned && plan.held == 1) return layer_norm_forward_rows<T, 1, false, true>;
  if (!aligned) return layer_norm_forward_rows<T, kMost, false, false>;
  if (!plan.one_warp) return layer_norm_forward_rows<T, kMost, true, false>;
  if (plan.held == kMost) return layer_norm_forward_rows<T, kMost, true, true>;
  if (plan.held == kMost / 2) return layer_norm_forward_rows<T, kMost / 2, true, true>;
  return layer_norm_forward_rows<T, kMost / 4, true, true>;
}

template <class T>
int run(LayerNormForward a, const Device& device, void* stream) {
  constexpr int kSize = kVector<T>;
  const bool aligned = a.n % kSize == 0 && offset_in_vector(a.x) == 0 && offset_in_vector(a.y) == 0 &&
                       offset_in_vector(a.weight) == 0 && offset_in_vector(a.bias) == 0;
  a.y_vectors = offset_in_vector(a.x) == offset_in_vector(a.y);
  const int64_t vectors = aligned ? a.n / kSize : divide_up(a.n + kSize - 1, kSize);
  const RowPlan plan = plan_rows(vectors, aligned, kTuning<T>, device.clusters);
  a.cluster = plan.cluster;
  return launch(kernel_for<T>(plan, aligned), a, grid_for(plan, a.rows), dim3(plan.threads, plan.rows), 0,
                plan.cluster, stream);
}

}  // namespace
}  // namespace fuseline

int fuseline_layer_norm_forward(const void* x, const void* weight, const void* bias, void* y, float* mean, float* rstd,
                                int64_t rows, int64_t n, double eps, int dtype, int weight_dtype, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype) || ((weight || bias) && !weights_fit(weight_dtype, dtype))) return FUSELINE_UNSUPPORTED;
  if (rows == 0 || n == 0) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  LayerNormForward a{};
  a.x = x, a.weight = weight, a.bias = bias, a.y = y, a.mean = mean, a.rstd = rstd;
  a.rows = rows, a.n = n, a.eps = float(eps), a.fp32_weights = weight_dtype == FUSELINE_FLOAT32;
  return with_dtype(dtype, [&](auto type) { return run<decltype(type)>(a, device, stream); });
}
