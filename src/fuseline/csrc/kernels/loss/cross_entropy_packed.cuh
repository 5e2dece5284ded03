// Cross-entropy of rows that a warp's registers hold: rows are packed into blocks, as in softmax_forward.cu, and the
// thread that has the score of the target writes the loss.
#pragma once

#include "cross_entropy.cuh"
#include "device/overlap.cuh"

namespace fuseline {

template <class T>
constexpr int kMostHeld = 32 / kVector<T>;

// What is known of a row once its threads have met.
template <class T>
struct Finished {
  float max, sum, log_sum, linear;
  int64_t target;
  bool ignored;
  RowGradient gradient;
};

template <class T>
__device__ __forceinline__ Finished<T> finish(const CrossEntropy& a, int64_t row, int64_t target,
                                              const MaxSum<T>& whole) {
  Finished<T> done;
  done.max = finite(whole.max);
  done.sum = float(whole.sum);
  done.log_sum = logf(done.sum);
  done.linear = whole.linear;
  done.target = target;
  done.ignored = is_ignored(a, target);
  done.gradient = {0.f, 0.f, 0.f, 0.f};
  if (is_column(a, target) && !done.ignored) {
    done.gradient = row_gradient(a, scale_of(a, row), target, done.max, done.sum, done.log_sum);
  } else {
    done.gradient.factor = done.ignored ? 0.f : kInfinity - kInfinity;
  }
  return done;
}

// Written by one thread of the row: its statistics, and the loss where no thread has the target's score.
template <class T>
__device__ __forceinline__ void keep_row(const CrossEntropy& a, int64_t row, const Finished<T>& done) {
  if (a.statistics) a.statistics[row] = make_float2(done.max, done.sum);
  if (done.ignored || !is_column(a, done.target)) a.loss[row] = done.gradient.factor;
}

// Loss and gradient from the scores of a vector.
template <class T, class Index>
__device__ __forceinline__ void close_vector(const CrossEntropy& a, int64_t row, const Finished<T>& done, Index first,
                                             T* grad, float (&z)[kVector<T>]) {
  constexpr int kSize = kVector<T>;
  if (!done.ignored && is_column(a, done.target) && done.target >= first && done.target < first + kSize) {
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) score = first + i == done.target ? z[i] : score;
    a.loss[row] = loss_of(a, done.target, score, done.max, done.log_sum, done.linear);
  }
  if (!grad) return;
  if (done.ignored) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) z[i] = 0.f;
  } else {
    gradient_of<T, Index>(a, done.gradient, Index(done.target), first, z);
  }
  store_vector<T, false>(grad, first, Index(a.width), a.grad_vectors, z);
}

// A row from the registers of its threads. ahead() is called once its 16-byte vectors have been read.
template <class T, int kHeld, bool kOneWarp, class Ahead>
__device__ __forceinline__ void close_row(const CrossEntropy& a, Group<MaxSum<T>, kOneWarp>& group, int64_t row,
                                          int64_t target, int start, int step, const uint4 (&raw)[kHeld],
                                          Ahead&& ahead) {
  constexpr int kSize = kVector<T>;
  float z[kHeld][kSize];
  float max = -kInfinity, linear = 0.f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    scores_of<T>(a, raw[k], start + k * step, z[k]);
#pragma unroll
    for (int i = 0; i < kSize; ++i) max = fmaxf(max, z[k][i]);
  }
  if (a.label_smoothing != 0.f) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) linear += linear_of<T>(a, start + k * step, z[k]);
    linear = group.warp_sum(linear);
  }
  ahead();
  MaxSum<T> warp{group.warp_max(max), linear, 0};
  const float taken_out = finite(warp.max);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) warp.sum += exponential<T>(z[k][i] - taken_out);
  }
  warp.sum = group.warp_sum(warp.sum);
  const MaxSum<T> whole = meet<T, true>(warp, group);
  wait_for_total(a);
  if (row >= a.rows) return;
  const Finished<T> done = finish<T>(a, row, target, whole);
  if (group.lane == 0 && group.rank == 0) keep_row<T>(a, row, done);
  T* const grad = a.grad ? static_cast<T*>(a.grad) + row * a.width : nullptr;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) close_vector<T>(a, row, done, start + k * step, grad, z[k]);
}

template <class T, int kHeld>
__global__ void __launch_bounds__(most_threads(true), 2) cross_entropy_rows(const CrossEntropy a) {
  __shared__ MaxSum<T> shared[2 * kMaxStates];
  Group<MaxSum<T>, true> group(shared, 1);
  begin(a);
  const int step = group.threads * kVector<T>;
  const int64_t row = int64_t(group.first) * blockDim.y + threadIdx.y;
  const int inside = row < a.rows ? int(a.width) : 0;
  const int64_t target = row < a.rows ? target_of(a, row) : 0;
  const T* x = static_cast<const T*>(a.logits) + row * a.width;
  const int start = group.lane * kVector<T> - elements_into_vector(x);
  uint4 raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) raw[k] = load_vector<T, false>(x, start + k * step, inside, true);
  close_row<T, kHeld>(a, group, row, target, start, step, raw, [] {});
}

}  // namespace fuseline
