// What a linear head's loss and its gradients' products need, of logits that are never in memory. See device/head_powers.cuh.

#include "fuseline_linear_head.h"

#include "device/head_powers.cuh"

namespace fuseline {
namespace {

// ---- kernels ----

using T = __nv_bfloat16;

constexpr int kSettleRows = 32, kSettleParts = 16, kSettleThreads = kSettleRows * kSettleParts;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kAgainThreads = 1024, kAgainWarps = kAgainThreads / kWarp;
// Of the sum of a row's powers. The factor, 1 over it, a mean's divisor and a word's weight, leaves room below for elements of
// hidden that it is multiplied by. No finite row sums to less: its largest power is some 2^-kHeadRoom or more.
constexpr float kMostSum = 0x1p96f, kLeastSum = 0x1p-96f;

struct HeadRows {
  const T *hidden, *weight;
  const void* target;
  const float *class_weight, *divisor, *sums, *scores;
  const float2* sampled;
  T *powers, *scaled;
  float *factors, *loss;
  int* again;  // [rows]: whether the row is to be computed by its own
  int64_t ignore_index;
  int rows, words, n, k, tiles;
  float z_loss;
  bool int32_targets;
};

__device__ __forceinline__ int64_t target_of(const HeadRows& a, int row) {
  return a.int32_targets ? int64_t(static_cast<const int32_t*>(a.target)[row]) : static_cast<const int64_t*>(a.target)[row];
}

// What a row's sum of powers settles: its loss, its factor, and its target's power. `own`: that power in fp32, taken as those
// of the sum are, so that 1 - p is right where the target has next to all of it.
__device__ __forceinline__ float settle(const HeadRows& a, int row, float lse, float sum, float score, float own) {
  const int64_t target = target_of(a, row);
  float loss = INFINITY - INFINITY, factor = loss;
  if (target == a.ignore_index) {
    loss = factor = 0.f;
  } else if (target >= 0 && target < a.n) {
    const float weight = a.class_weight ? a.class_weight[target] : 1.f;
    loss = weight * (lse - score) + a.z_loss * lse * lse;
    float of_power = weight + 2.f * a.z_loss * lse;
    // Of a row whose powers count for nothing its target's still does.
    if (fabsf(of_power) < 1e-6f * fabsf(weight)) of_power = copysignf(1e-6f * weight, of_power);
    factor = of_power / (a.divisor ? sum * *a.divisor : sum);
    if (of_power != 0.f) a.powers[int64_t(row) * a.words + target] = from_float<T>(own - sum * (weight / of_power));
  }
  a.loss[row] = loss;
  a.factors[row] = factor;
  return factor;
}

// A row of hidden by its factor, by `threads` of which this is number `thread`; zeros where the factor is 0.
__device__ __forceinline__ void scale_hidden(const HeadRows& a, int row, float factor, int thread, int threads) {
  if (!a.scaled) return;
  const uint4* const from = reinterpret_cast<const uint4*>(a.hidden + int64_t(row) * a.k);
  uint4* const to = reinterpret_cast<uint4*>(a.scaled + int64_t(row) * a.k);
  for (int i = thread; i < a.k / kVector<T>; i += threads) {
    float values[kVector<T>];
    unpack<T>(from[i], values);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) values[j] = factor == 0.f ? 0.f : values[j] * factor;
    to[i] = pack<T>(values);
  }
}

// Whether a row is no number, and nothing is left to compute. One that is ignored has zeros all the same.
__device__ __forceinline__ bool is_lost(const HeadRows& a, int row, float sampled, float sum, float score) {
  const int64_t target = target_of(a, row);
  if (target == a.ignore_index) return false;
  if (target < 0 || target >= a.n) return true;
  return sum != sum && (fabsf(sampled) < INFINITY || score != score);
}

__global__ void __launch_bounds__(kSettleThreads) settle_kernel(const HeadRows a) {
  __shared__ float sums[kSettleParts][kSettleRows], factors[kSettleRows];
  const int lane = int(threadIdx.x) % kSettleRows, part = int(threadIdx.x) / kSettleRows;
  const int first = int(blockIdx.x) * kSettleRows, row = first + lane;
  float sum = 0.f;
  if (row < a.rows) {
#pragma unroll 4
    for (int tile = part; tile < a.tiles; tile += kSettleParts) sum += a.sums[int64_t(tile) * a.rows + row];
  }
  sums[part][lane] = sum;
  __syncthreads();
  if (part == 0 && row < a.rows) {
#pragma unroll 1
    for (int i = 1; i < kSettleParts; ++i) sum += sums[i][lane];
    const float sampled = a.sampled[row].x, shift = head_shift(sampled), score = a.scores[row];
    const bool again = !(sum >= kLeastSum && sum <= kMostSum) && !is_lost(a, row, sampled, sum, score);
    a.again[row] = again;
    const float lse = (shift + log2f(sum)) * kLn2;
    factors[lane] = again ? 0.f : settle(a, row, lse, sum, score, head_power(score, shift));
  }
  __syncthreads();
  for (int i = part; i < kSettleRows && first + i < a.rows; i += kSettleParts) {
    scale_hidden(a, first + i, factors[i], lane, kSettleRows);
  }
}

__device__ __forceinline__ float logit_of(const HeadRows& a, const float* hidden, int word) {
  const uint4* const weight = reinterpret_cast<const uint4*>(a.weight + int64_t(word) * a.k);
  float sum = 0.f;
  for (int i = int(threadIdx.x) % kWarp; i < a.k / kVector<T>; i += kWarp) {
    float values[kVector<T>];
    unpack<T>(weight[i], values);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) sum = fmaf(hidden[i * kVector<T> + j], values[j], sum);
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
}

// Rows whose sum was out of reach, a block each: their logits twice, for the largest and for the powers.
__global__ void __launch_bounds__(kAgainThreads) again_kernel(const HeadRows a) {
  extern __shared__ float hidden[];
  __shared__ int found[kAgainThreads];
  __shared__ int count;
  __shared__ float2 states[kAgainWarps];
  __shared__ float score, whole[2];
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int64_t stride = int64_t(gridDim.x) * kAgainThreads;
  for (int64_t base = 0; base < a.rows; base += stride) {
    const int64_t looked_at = base + int64_t(threadIdx.x) * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (looked_at < a.rows && a.again[looked_at]) found[atomicAdd(&count, 1)] = int(looked_at);
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      const int row = found[i];
      T* const powers = a.powers + int64_t(row) * a.words;
      const int64_t target = target_of(a, row);
      const bool ignored = target == a.ignore_index;
      for (int c = int(threadIdx.x); c < a.k; c += kAgainThreads) hidden[c] = to_float(a.hidden[int64_t(row) * a.k + c]);
      __syncthreads();
      float2 state = make_float2(-INFINITY, 0.f);
      for (int word = warp; word < a.n && !ignored; word += kAgainWarps) {
        const float logit = logit_of(a, hidden, word);
        if (word == target && lane == 0) score = logit;
        const float max = fmaxf(state.x, logit), at = max == -INFINITY ? 0.f : max;
        state = make_float2(max, state.y * expf(state.x - at) + expf(logit - at));
      }
      if (lane == 0) states[warp] = state;
      __syncthreads();
      if (threadIdx.x == 0) {
        float max = -INFINITY, sum = 0.f;
        for (int w = 0; w < kAgainWarps; ++w) max = fmaxf(max, states[w].x);
        const float at = max == -INFINITY ? 0.f : max;
        for (int w = 0; w < kAgainWarps; ++w) sum += states[w].y * expf(states[w].x - at);
        whole[0] = max, whole[1] = sum;
      }
      __syncthreads();
      const float max = whole[0], sum = whole[1];
      for (int word = warp; word < a.words; word += kAgainWarps) {
        const float power = word < a.n && !ignored ? expf(logit_of(a, hidden, word) - max) : 0.f;
        if (lane == 0) powers[word] = from_float<T>(power);
      }
      __syncthreads();
      if (threadIdx.x == 0) whole[1] = settle(a, row, max + logf(sum), sum, score, expf(score - max));
      __syncthreads();
      scale_hidden(a, row, whole[1], int(threadIdx.x), kAgainThreads);
      __syncthreads();
    }
    __syncthreads();
  }
}

// ---- launcher ----

constexpr int64_t kLeastRows = 1024, kLeastWords = 8192, kMostWidth = 8192;

struct Rooms {
  float2* sampled;
  float *sums, *scores;
  int* again;
  size_t bytes;
};

Rooms rooms_of(void* workspace, int64_t rows, int64_t words) {
  Rooms found{};
  size_t at = 0;
  const auto take = [&](size_t bytes) {
    const size_t from = at;
    at += (bytes + 15) / 16 * 16;
    return static_cast<char*>(workspace) + from;
  };
  found.sampled = reinterpret_cast<float2*>(take(size_t(rows) * sizeof(float2)));
  found.sums = reinterpret_cast<float*>(take(size_t(divide_up(words, kHeadWide) * rows) * sizeof(float)));
  found.scores = reinterpret_cast<float*>(take(size_t(rows) * sizeof(float)));
  found.again = reinterpret_cast<int*>(take(size_t(rows) * sizeof(int)));
  found.bytes = at;
  return found;
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

size_t fuseline_head_powers_workspace(int64_t rows, int64_t words) { return rooms_of(nullptr, rows, words).bytes; }

int fuseline_head_powers_takes(const fuseline_head_powers* given) {
  const fuseline_head_powers& call = *given;
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  constexpr int64_t kMost = 0x3fffffff;
  if (call.rows < kLeastRows || call.rows > kMost || call.words > kMost || call.n > call.words || call.n < kLeastWords) return false;
  if (call.words % 8 != 0 || call.k % 8 != 0 || call.k < kHeadPieces * kHeadStep || call.k > kMostWidth) return false;
  if (!aligned(call.hidden) || !aligned(call.weight)) return false;
  Device device;
  int resident = 0;
  if (current_device(device) != cudaSuccess || !device.warpgroups) return false;
  const cudaError_t asked = resident_clusters(head_kernel<T, HeadPowersTile>, device, kHeadThreads, size_t(kHeadShared),
                                              kHeadCluster, resident);
  return asked == cudaSuccess && resident > 0;
}

int fuseline_head_powers_forward(const fuseline_head_powers* given, void* stream) {
  const fuseline_head_powers& call = *given;
  if (!fuseline_head_powers_takes(given)) return FUSELINE_UNSUPPORTED;
  const Rooms rooms = rooms_of(call.workspace, call.rows, call.words);
  HeadLoss sample{};
  sample.parts = rooms.sampled, sample.rows = int(call.rows), sample.n = kHeadWide;
  int error = run_head<T, HeadLossTile>(sample, call.hidden, call.weight, call.rows, kHeadWide, call.k, FUSELINE_BFLOAT16, 0.0,
                                        stream, call.n / kHeadWide);
  if (error != 0) return error;
  HeadPowers a{};
  a.target = call.target, a.int32_targets = call.target_bytes == 4;
  a.sampled = rooms.sampled, a.sums = rooms.sums, a.scores = rooms.scores, a.powers = static_cast<T*>(call.powers);
  a.rows = int(call.rows), a.words = int(call.words), a.n = int(call.n);
  error = run_head<T, HeadPowersTile>(a, call.hidden, call.weight, call.rows, call.words, call.k, FUSELINE_BFLOAT16, 0.0, stream);
  if (error != 0) return error;
  HeadRows r{};
  r.hidden = static_cast<const T*>(call.hidden), r.weight = static_cast<const T*>(call.weight), r.target = call.target;
  r.class_weight = call.class_weight, r.divisor = call.divisor, r.sums = rooms.sums, r.scores = rooms.scores;
  r.sampled = rooms.sampled, r.powers = a.powers, r.scaled = static_cast<T*>(call.scaled);
  r.factors = call.factors, r.loss = call.loss, r.again = rooms.again, r.ignore_index = call.ignore_index;
  r.rows = a.rows, r.words = a.words, r.n = a.n, r.k = int(call.k), r.tiles = a.tiles;
  r.z_loss = float(call.z_loss), r.int32_targets = a.int32_targets;
  error = launch(settle_kernel, r, divide_up(call.rows, kSettleRows), dim3(kSettleThreads), 0, 1, stream);
  if (error != 0) return error;
  Device device;
  const cudaError_t asked = current_device(device);
  if (asked != cudaSuccess) return int(asked);
  return launch(again_kernel, r, device.processors, dim3(kAgainThreads), size_t(call.k) * sizeof(float), 1, stream);
}
