// What a linear head's loss and its gradients' products need, of logits that are never in memory. See loss/head_powers.cuh.

#include "fuseline_linear_head.h"

#include "head_powers.cuh"

namespace fuseline {
namespace {

// ---- kernels ----

using T = __nv_bfloat16;

constexpr int kSettleRows = 32, kSettleParts = 16, kSettleThreads = kSettleRows * kSettleParts;
constexpr float kLn2 = 0.6931471805599453f;
// Of the sum of a row's powers. The factor, 1 over it, a mean's divisor and a word's weight, leaves room below for elements of
// hidden that it is multiplied by. No finite row sums to less: its largest power is some 2^-kHeadRoom or more.
constexpr float kMostSum = 0x1p96f, kLeastSum = 0x1p-96f, kMostFinite = 0x1.fffffep127f;

struct HeadRows {
  const T* hidden;
  const void* target;
  const float *class_weight, *divisor, *sums, *scores;
  const float2* parts;  // [tiles][rows] of all logits, the largest first
  float2* sampled;      // [rows]
  T *powers, *scaled;
  float *factors, *loss;
  int* again;           // whether there are rows whose sum was out of reach
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

// Whether the sum tells all there is to tell of a row.
__device__ __forceinline__ bool is_settled(const HeadRows& a, int row, float sum) {
  if (sum >= kLeastSum && sum <= kMostSum) return true;
  const int64_t target = target_of(a, row);
  if (target == a.ignore_index || target < 0 || target >= a.n) return true;
  // No number: a logit is none, rather than too far from the sample.
  return sum != sum && (fabsf(a.sampled[row].x) < INFINITY || a.scores[row] != a.scores[row]);
}

// kLast: of shifts by the rows' own largest logits, where there were rows whose sums were out of reach.
template <bool kLast>
__global__ void __launch_bounds__(kSettleThreads) settle_kernel(const HeadRows a) {
  __shared__ float sums[kSettleParts][kSettleRows], factors[kSettleRows];
  __shared__ bool finite[kSettleRows];
  if (kLast && *a.again == 0) return;
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
    finite[lane] = sum <= kMostFinite;
    factors[lane] = 0.f;
    if (kLast || is_settled(a, row, sum)) {
      const float shift = head_shift(a.sampled[row].x), score = a.scores[row], lse = (shift + log2f(sum)) * kLn2;
      factors[lane] = settle(a, row, lse, sum, score, head_power(score, shift));
    } else {
      *a.again = 1;
    }
  }
  __syncthreads();
  for (int i = part; i < kSettleRows && first + i < a.rows; i += kSettleParts) {
    scale_hidden(a, first + i, factors[i], lane, kSettleRows);
    // What is ignored counts for nothing, be it infinite.
    if (finite[i] || target_of(a, first + i) != a.ignore_index) continue;
    T* const powers = a.powers + int64_t(first + i) * a.words;
    for (int word = lane; word < a.words; word += kSettleRows) powers[word] = from_float<T>(0.f);
  }
}

// The largest logit of all in the place of the sample's.
__global__ void __launch_bounds__(kSettleThreads) raise_kernel(const HeadRows a) {
  __shared__ float most[kSettleParts][kSettleRows];
  if (*a.again == 0) return;
  const int lane = int(threadIdx.x) % kSettleRows, part = int(threadIdx.x) / kSettleRows;
  const int row = int(blockIdx.x) * kSettleRows + lane;
  float max = -INFINITY;
  if (row < a.rows) {
#pragma unroll 4
    for (int tile = part; tile < a.tiles; tile += kSettleParts) max = fmaxf(max, a.parts[int64_t(tile) * a.rows + row].x);
  }
  most[part][lane] = max;
  __syncthreads();
  if (part > 0 || row >= a.rows) return;
#pragma unroll 1
  for (int i = 1; i < kSettleParts; ++i) max = fmaxf(max, most[i][lane]);
  a.sampled[row].x = max;
}

// ---- launcher ----

constexpr int64_t kLeastRows = 1024, kLeastWords = 8192;

struct Rooms {
  float2 *sampled, *parts;
  float *sums, *scores;  // sums in the place of parts
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
  found.parts = reinterpret_cast<float2*>(take(size_t(divide_up(words, kHeadWide) * rows) * sizeof(float2)));
  found.sums = reinterpret_cast<float*>(found.parts);
  found.scores = reinterpret_cast<float*>(take(size_t(rows) * sizeof(float)));
  found.again = reinterpret_cast<int*>(take(sizeof(int)));
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
  if (call.words % 8 != 0 || call.k % 8 != 0 || call.k < kHeadPieces * kHeadStep) return false;
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
  const cudaError_t reset = cudaMemsetAsync(rooms.again, 0, sizeof(int), static_cast<cudaStream_t>(stream));
  if (reset != cudaSuccess) return int(reset);
  // The largest logits and sums of the first `n` words of every `every`-th.
  const auto run_sums = [&](float2* parts, const int* wanted, int64_t n, int64_t every) {
    HeadLoss a{};
    a.parts = parts, a.wanted = wanted, a.rows = int(call.rows), a.n = int(n);
    return run_head<T, HeadLossTile>(a, call.hidden, call.weight, call.rows, n, call.k, FUSELINE_BFLOAT16, 0.0, stream, every);
  };
  HeadPowers a{};
  a.target = call.target, a.int32_targets = call.target_bytes == 4;
  a.sampled = rooms.sampled, a.sums = rooms.sums, a.scores = rooms.scores, a.powers = static_cast<T*>(call.powers);
  a.rows = int(call.rows), a.words = int(call.words), a.n = int(call.n);
  const auto run_powers = [&](const int* wanted) {
    a.wanted = wanted;
    return run_head<T, HeadPowersTile>(a, call.hidden, call.weight, call.rows, call.words, call.k, FUSELINE_BFLOAT16, 0.0, stream,
                                       1, call.n);
  };
  HeadRows r{};
  r.hidden = static_cast<const T*>(call.hidden), r.target = call.target, r.class_weight = call.class_weight;
  r.divisor = call.divisor, r.sums = rooms.sums, r.scores = rooms.scores, r.parts = rooms.parts, r.sampled = rooms.sampled;
  r.powers = a.powers, r.scaled = static_cast<T*>(call.scaled), r.factors = call.factors, r.loss = call.loss;
  r.again = rooms.again, r.ignore_index = call.ignore_index, r.rows = a.rows, r.words = a.words, r.n = a.n, r.k = int(call.k);
  r.z_loss = float(call.z_loss), r.int32_targets = a.int32_targets;
  const auto run_rows = [&](void (*kernel)(HeadRows), int tiles) {
    r.tiles = tiles;
    return launch(kernel, r, divide_up(call.rows, kSettleRows), dim3(kSettleThreads), 0, 1, stream);
  };
  const int tiles = int(divide_up(call.words, kHeadWide)), counted = int(divide_up(call.n, kHeadWide));
  int error = run_sums(rooms.sampled, nullptr, kHeadWide, call.n / kHeadWide);
  if (error == 0) error = run_powers(nullptr);
  if (error == 0) error = run_rows(settle_kernel<false>, tiles);
  // Nothing of what follows is done where no row asks for it.
  if (error == 0) error = run_sums(rooms.parts, rooms.again, call.n, 1);
  if (error == 0) error = run_rows(raise_kernel, counted);
  if (error == 0) error = run_powers(rooms.again);
  if (error == 0) error = run_rows(settle_kernel<true>, tiles);
  return error;
}
