// The norms' forward for rows of y's dtype that keep to 16-byte steps and that threads hold in registers: y = (x - mean) *
// rstd * weight + bias over each row (mean 0 in an RMS norm), of x or of sum = residual + x, which is returned, too, or of
// sum = residual + dropout(x + x_bias).
//
// Moves: x (and residual) read once, y (and sum) written once; weight and bias come from cache. Does: about 9 operations an
// element, and 15 more for a mask. Limit: HBM bandwidth. Threads: a row belongs to a part of a warp, a warp, a block or a
// cluster, kHeld vectors a thread; of rows that are a warp's or less a thread has kRows, all on their way at a time, and its
// weights once.
#pragma once

#include "kept.cuh"
#include "norm_row.cuh"
#include "device/waiting.cuh"

namespace fuseline {

// What a thread holds, and how a block is laid out. kEarly: weights of rows' dtype are on their way with the rows.
template <int kVectorsHeld, int kRowsEach, bool kWarpEach, bool kWeightsEarly, int kMost, int kLeast, bool kOfClusters = false>
struct Holding {
  static constexpr int kHeld = kVectorsHeld, kRows = kRowsEach;
  static constexpr bool kOneWarp = kWarpEach, kEarly = kWeightsEarly, kClusters = kOfClusters;
  static constexpr int kThreads = kMost, kBlocks = kLeast;  // of a block at most, of a multiprocessor at least
  // Whether addresses are there before the kernel ahead has ended, at a few registers' cost: few rows wait for them.
  static constexpr bool kReady = !kOneWarp || kHeld * kRows == 1;
};

// kAdded: of a sum; kMasked: of which a part is dropped, or has a bias of its own.
template <class T, class Layout, bool kAdded, bool kMasked>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kBlocks) norm_forward_held(const NormForward a) {
  constexpr int kHeld = Layout::kHeld, kRows = Layout::kRows, kSize = kVector<T>;
  constexpr bool kClusters = Layout::kClusters;
  __shared__ __align__(16) Moments shared[Layout::kOneWarp ? 1 : Layout::kThreads / kWarp * (kClusters ? kMostBlocks : 1)];
  __shared__ uint64_t met;
  let_next_start();
  const int blocks = kClusters ? a.cluster : 1, rank = kClusters ? int(blockIdx.x) & (blocks - 1) : 0;
  if constexpr (kClusters) {
    if (threadIdx.x == 0) barrier_init(&met, 1);
    publish_barriers();
    cluster_arrive_relaxed();
    __syncwarp();
  }
  const int n = int(a.n), threads = int(blockDim.x), lane = int(threadIdx.x);
  const int step = threads * kSize, start = (rank * kHeld * threads + lane) * kSize;
  const int width = min(threads, kWarp);
  const bool alone = Layout::kOneWarp || (!kClusters && threads <= kWarp);  // a row has one warp, or less
  const int64_t first =
      kClusters ? int64_t(int(blockIdx.x) / blocks) : int64_t(blockIdx.x) * (blockDim.y * kRows) + threadIdx.y;
  const float inverse_n = 1.f / float(n);
  float count = float(n), inverse = inverse_n;
  if (!alone) {  // of this warp's elements
    const int from = start - lane % kWarp * kSize;
    int mine = 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) mine += count_inside<kWarp * kSize>(from + k * step, n);
    count = float(mine), inverse = 1.f / float(max(mine, 1));
  }
  const T* x = static_cast<const T*>(kAdded ? a.residual : a.x) + first * a.n + start;
  const T* added = static_cast<const T*>(a.x) + first * a.n + start;
  const uint4* weights_at = static_cast<const uint4*>(a.weight) + start / kSize;
  const uint4* biases_at = static_cast<const uint4*>(a.bias) + start / kSize;
  const bool keeps = sizeof(T) == 4 || !a.fp32_weights;
  int has_weight = keeps && a.weight, has_bias = keeps && a.bias;
  if constexpr (Layout::kReady) {
    make_ready(x), make_ready(weights_at), make_ready(biases_at), make_ready(has_weight), make_ready(has_bias);
    make_ready(inverse), make_ready(count);
    if (kAdded) make_ready(added);
  }
  wait_for_earlier();
  [[maybe_unused]] const uint64_t seed = kMasked && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;

  uint4 raw[kRows][kHeld], branch[kRows][kAdded ? kHeld : 1];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r * int(blockDim.y), apart = r * int(blockDim.y) * a.n;
    const int inside = row < a.rows ? n : 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      // Not past the L1, which was measured to cost a hundredth, as was to stream y.
      raw[r][k] = start + k * step < inside ? *reinterpret_cast<const uint4*>(x + apart + k * step) : make_uint4(0, 0, 0, 0);
    }
    if constexpr (kAdded) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        branch[r][k] =
            start + k * step < inside ? *reinterpret_cast<const uint4*>(added + apart + k * step) : make_uint4(0, 0, 0, 0);
      }
    }
  }
  // Weights are on their way with the rows, or from where registers have room for them, while the row's warps meet.
  constexpr bool kEarly = Layout::kEarly, kLater = kMasked && !kEarly && !Layout::kOneWarp, kAsked = kEarly || kLater;
  const bool asked = kAsked && keeps;
  uint4 weight[kAsked ? kHeld : 1], bias[kAsked ? kHeld : 1];
  const auto ask_for_weights = [&] {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      weight[k] = ones<T>(), bias[k] = make_uint4(0, 0, 0, 0);
      if (start + k * step >= n) continue;
      if (has_weight) weight[k] = __ldg(weights_at + k * (step / kSize));
      if (has_bias) bias[k] = __ldg(biases_at + k * (step / kSize));
    }
  };
  if constexpr (kEarly) ask_for_weights();
  // A mask and its bias need nothing of the rows, which are on their way.
  [[maybe_unused]] uint4 x_bias[kMasked ? kHeld : 1];
  [[maybe_unused]] uint32_t kept[kRows][kMasked ? kHeld : 1];
  [[maybe_unused]] const float scale = kMasked && a.dropout.seed ? a.dropout.scale : 1.f;
  if constexpr (kMasked) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      x_bias[k] = make_uint4(0, 0, 0, 0);
      if (keeps && a.x_bias && start + k * step < n) {
        x_bias[k] = __ldg(static_cast<const uint4*>(a.x_bias) + (start + k * step) / kSize);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t base = (first + r * int(blockDim.y)) * a.n;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        kept[r][k] = a.dropout.seed ? kept_of<kSize>(a.dropout, seed, base + start + k * step) : ~0u;
        make_ready(kept[r][k]);
      }
    }
  }
  const auto sum = [&](auto value) {
#pragma unroll
    for (int by = kWarp / 2; by > 0; by /= 2) {
      if (by < width) value = plus(value, from_lane(value, by));
    }
    return value;
  };
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r * int(blockDim.y);
    float values[kHeld][kSize];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      unpack<T>(raw[r][k], values[k]);
      if constexpr (kAdded) {
        const int column = start + k * step;
        if (column >= n || row >= a.rows) continue;
        float added[kSize];
        unpack<T>(branch[r][k], added);
        if constexpr (kMasked) {
          float bias[kSize];
          unpack<T>(x_bias[k], bias);
          if (!keeps && a.x_bias) load_weights<T, true>(a.x_bias, true, column, n, bias);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            values[k][i] = fmaf(added[i] + bias[i], kept[r][k] >> i & 1 ? scale : 0.f, values[k][i]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[k][i] += added[i];
        }
        const uint4 rounded = pack<T>(values[k]);
        *reinterpret_cast<uint4*>(static_cast<T*>(a.sum) + row * a.n + column) = rounded;
        unpack<T>(rounded, values[k]);
      }
    }
    if constexpr (kLater) ask_for_weights();
    Moments whole = moments_near(
        values, count, inverse, a.centred, [&](int k) { return start + k * step < n; }, sum,
        [&](float value) { return __shfl_sync(kAllLanes, value, 0, width); });
    if (!alone) {
      const int warps = threads / kWarp, in_warp = lane % kWarp;
      if constexpr (kClusters) {
        cluster_wait();  // the others' barriers are there
        if (lane == 0) barrier_expect(&met, blocks * warps * int(sizeof(Moments)));
        if (in_warp < blocks) send_in_cluster(&shared[rank * warps + lane / kWarp], &met, in_warp, whole);
        barrier_wait(&met, 0);
      } else {
        if (in_warp == 0) shared[int(threadIdx.y) * warps + lane / kWarp] = whole;
        __syncthreads();
      }
      const Moments* const of_row = kClusters ? shared : shared + int(threadIdx.y) * warps;
      whole = combine_near(of_row, blocks * warps, float(n), inverse_n, a.centred);
    }
    const float rstd = rstd_of<T>(whole.squares, inverse_n, a.eps);
    const Standard<T> standard(whole.mean, rstd);
    if (row >= a.rows) return;
    if (lane == 0 && rank == 0) keep_statistics(a, row, whole.mean, rstd);
    T* const y = static_cast<T*>(a.y) + row * a.n;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int column = start + k * step;
      if (column >= n) continue;
      if (kAsked && asked) {
        float weights[kSize], biases[kSize];
        unpack<T>(weight[kAsked ? k : 0], weights);
        unpack<T>(bias[kAsked ? k : 0], biases);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          values[k][i] = fmaf(standard(values[k][i]), weights[i], biases[i]);
        }
      } else {
        normalize<T, true>(a, column, n, whole.mean, rstd, values[k]);
      }
      *reinterpret_cast<uint4*>(y + column) = pack<T>(values[k]);
    }
  }
}

}  // namespace fuseline
