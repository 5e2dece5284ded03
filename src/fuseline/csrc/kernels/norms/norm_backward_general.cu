// The norms' backward for rows of any length at any address. No model's rows come here on a device with clusters: those keep to
// 16-byte steps, and other kernels move them once.
//
// Moves: x and grad_y (and grad_sum) twice or three times, of which the caches give some; grad_x (and grad_dropped) once. Limit:
// HBM bandwidth, and instructions: an element is an access, and dtypes are arguments, so that one kernel serves all of them. A
// kernel has the gradients of rows, another the sums over rows.
//
// Threads: a row is a warp's, a block's or, of more elements than its threads have at once, a cluster's. A thread has every
// stride-th element, kGeneralHeld at once; those that it began with stay in registers until the row has met, the others are read
// again. Sums over rows: a warp has neighbouring columns, and the warps of a block, and some blocks (`shares`), have rows of
// their own.
#include "norm_gradient.cuh"
#include "device/overlap.cuh"

namespace fuseline {

using norm_backward_plans::kGeneralHeld;
using norm_backward_plans::kGeneralThreads;
using norm_backward_plans::kGeneralWarps;
constexpr int kGeneralRows = 6;  // rows of which a thread reads its column at once

struct GeneralNorm {
  NormBackward norm;
  float2* terms;  // RowTerms::offset and slope of each row, for the sums of what it gives; null: not wanted
  int column_blocks, shares;
  int dtype, y_dtype;  // fuseline_dtype, of what was normalized and of y

  __device__ __forceinline__ int x_dtype() const { return norm.normalized ? y_dtype : dtype; }

  __device__ __forceinline__ int weight_dtype() const { return norm.fp32_weights ? int(FUSELINE_FLOAT32) : y_dtype; }
};

__global__ void __launch_bounds__(kGeneralThreads, 2) norm_backward_general(const GeneralNorm given) {
  constexpr int kHeld = kGeneralHeld;
  __shared__ float2 states[kGeneralWarps], of_blocks[kMaxCluster];
  const NormBackward& a = given.norm;
  const int cluster = a.cluster, rank = int(blockIdx.x) & (cluster - 1);
  if (cluster > 1) cluster_arrive();  // nobody writes to a block that has not begun
  let_next_start();
  wait_for_earlier();
  const int threads = cluster * int(blockDim.x), lane = rank * int(blockDim.x) + int(threadIdx.x);
  const int64_t row = int64_t(blockIdx.x) / cluster * blockDim.y + threadIdx.y, base = row * a.n;
  const int64_t n = row < a.rows ? a.n : 0, step = int64_t(kHeld) * threads;
  RowTerms terms;
  terms.mean = n > 0 && a.mean ? a.mean[row] : 0.f;
  terms.rstd = n > 0 ? a.rstd[row] : 0.f;
  const auto left_from = [&](int64_t first) { return int(min(n - first, step)); };
  // x - mean, and grad_y * weight, of elements first, first + threads, ..; zeros beyond the row.
  const auto load = [&](int64_t first, float (&apart)[kHeld], float (&weighted)[kHeld]) {
    const int64_t at = base + first;
    const int left = left_from(first);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      apart[k] = k * threads < left ? load_as(a.x, given.x_dtype(), at + k * threads) - terms.mean : 0.f;
      weighted[k] = k * threads < left ? load_as(a.grad_y, given.y_dtype, at + k * threads) : 0.f;
    }
    if (!a.weight) return;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k * threads < left) weighted[k] *= load_as(a.weight, given.weight_dtype(), first + k * threads);
    }
  };
  float2 sums = make_float2(0.f, 0.f);
  const auto add = [&](const float (&apart)[kHeld], const float (&weighted)[kHeld]) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      sums.x += weighted[k];
      sums.y += weighted[k] * apart[k];
    }
  };
  float apart[kHeld], weighted[kHeld];
  load(lane, apart, weighted);
  add(apart, weighted);
#pragma unroll 1
  for (int64_t first = lane + step; first < n; first += step) {
    float more[kHeld], more_weighted[kHeld];
    load(first, more, more_weighted);
    add(more, more_weighted);
  }
  sums = sum_of_lanes(sums, kWarp);
  if (blockDim.x > kWarp) {  // the block has one row
    if (threadIdx.x % kWarp == 0) states[threadIdx.x / kWarp] = sums;
    __syncthreads();
    sums = make_float2(0.f, 0.f);
    for (int warp = 0; warp < int(blockDim.x) / kWarp; ++warp) sums = plus(sums, states[warp]);
  }
  if (cluster > 1) {
    cluster_wait();
    if (int(threadIdx.x) < cluster) {
      store_in_cluster(&of_blocks[rank].x, int(threadIdx.x), __float_as_uint(sums.x));
      store_in_cluster(&of_blocks[rank].y, int(threadIdx.x), __float_as_uint(sums.y));
    }
    cluster_arrive();
    cluster_wait();
    sums = make_float2(0.f, 0.f);
    for (int block = 0; block < cluster; ++block) sums = plus(sums, of_blocks[block]);
  }
  terms.set(a, a.centred, sums.x, sums.y);
  if (given.terms && lane == 0 && n > 0) given.terms[row] = make_float2(terms.offset, terms.slope);
  if (!a.grad_x && !a.grad_dropped) return;

  const uint64_t seed = a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  const auto finish = [&](int64_t first, float (&apart)[kHeld], float (&weighted)[kHeld]) {
    const int64_t at = base + first;
    const int left = left_from(first);
    // The gradients take the place of what they are made of.
#pragma unroll
    for (int k = 0; k < kHeld; ++k) weighted[k] = weighted[k] * terms.scale - terms.offset - apart[k] * terms.slope;
    if (a.grad_sum) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (k * threads < left) weighted[k] += load_as(a.grad_sum, given.dtype, at + k * threads);
      }
    }
    if (a.grad_x) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (k * threads < left) store_as(a.grad_x, given.dtype, at + k * threads, weighted[k]);
      }
    }
    if (!a.grad_dropped) return;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k * threads >= left) continue;
      const float kept = a.dropout.seed ? dropout_multiplier(a.dropout, seed, at + k * threads) : 1.f;
      store_as(a.grad_dropped, given.y_dtype, at + k * threads, weighted[k] * kept);
    }
  };
  finish(lane, apart, weighted);
#pragma unroll 1
  for (int64_t first = lane + step; first < n; first += step) {
    load(first, apart, weighted);
    finish(first, apart, weighted);
  }
}

// The sums over rows of grad_y * x_hat, of grad_y and of what rows' gradients are behind the dropout.
__global__ void __launch_bounds__(kGeneralThreads, 2) norm_backward_general_sums(const GeneralNorm given) {
  constexpr int kRows = kGeneralRows, kKinds = kSumsOfAddedNorm;
  __shared__ float parts[kKinds][kGeneralWarps][kWarp];
  let_next_start();
  wait_for_earlier();
  const NormBackward& a = given.norm;
  const int lane = threadIdx.x, warp = threadIdx.y;
  const int share = int(blockIdx.x) / given.column_blocks;
  const int64_t c = int64_t(int(blockIdx.x) % given.column_blocks) * kWarp + lane;
  const int64_t step = int64_t(given.shares) * kGeneralWarps;  // between rows of a thread
  const void* const grad_sum = given.terms ? a.grad_sum : nullptr;
  const uint64_t seed = given.terms && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  const float weight = given.terms && a.weight && c < a.n ? load_as(a.weight, given.weight_dtype(), c) : 1.f;
  float weight_sum = 0.f, bias_sum = 0.f, x_bias_sum = 0.f;
  const int64_t rows = c < a.n ? a.rows : 0;
#pragma unroll 1
  for (int64_t first = share * kGeneralWarps + warp; first < rows; first += kRows * step) {
    float apart[kRows], grad[kRows], rstd[kRows], more[kRows];
    const int64_t base = first * a.n + c;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * step, at = base + r * step * a.n;
      const bool there = row < rows;
      apart[r] = there ? load_as(a.x, given.x_dtype(), at) - (a.mean ? a.mean[row] : 0.f) : 0.f;
      grad[r] = there ? load_as(a.grad_y, given.y_dtype, at) : 0.f;
      rstd[r] = there ? a.rstd[row] : 0.f;
      more[r] = there && grad_sum ? load_as(grad_sum, given.dtype, at) : 0.f;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      weight_sum += grad[r] * (apart[r] * RowTerms::unit(a, rstd[r]));
      bias_sum += grad[r];
      if (!given.terms || first + r * step >= rows) continue;
      const float2 terms = given.terms[first + r * step];
      const float scale = a.centred && a.n == 1 ? 0.f : rstd[r];
      const float of_row = grad[r] * weight * scale - terms.x - apart[r] * terms.y + more[r];
      x_bias_sum += a.dropout.seed ? of_row * dropout_multiplier(a.dropout, seed, base + r * step * a.n) : of_row;
    }
  }
  parts[0][warp][lane] = weight_sum, parts[1][warp][lane] = bias_sum, parts[2][warp][lane] = x_bias_sum;
  __syncthreads();
  const int kind = warp;
  if (kind >= kKinds || c >= a.n) return;
  void* const result = kind == 0 ? a.grad_weight : kind == 1 ? a.grad_bias : a.grad_x_bias;
  if (!result) return;
  double sum = 0.0;
#pragma unroll
  for (int part = 0; part < kGeneralWarps; ++part) sum += parts[kind][part][lane];
  if (given.shares > 1) {
    a.partials[(int64_t(kind) * given.shares + share) * a.columns + c] = float(sum);
  } else {
    store_as(result, given.weight_dtype(), c, float(sum));
  }
}

// ---- launcher ----

int launch_norm_backward_general(const NormBackward& norm, const NormBackwardPlan& plan, const NormCall& call) {
  NormBackward a = norm;
  a.cluster = plan.shape.cluster;
  GeneralNorm given{a, nullptr, plan.column_blocks, plan.shares, call.dtype, call.y_dtype};
  // What the sums of x_bias's gradient are made of stands behind the partial sums.
  if (a.grad_x_bias) given.terms = reinterpret_cast<float2*>(a.partials + int64_t(plan.kinds) * plan.blocks * a.columns);
  const auto rows = [&](const GeneralNorm& of) {
    return launch(norm_backward_general, of, plan.shape, call.device, call.stream);
  };
  const auto sums = [&] {
    const LaunchShape shape{int64_t(plan.column_blocks) * plan.shares, kWarp, kGeneralWarps, 1, 0};
    const int error = launch(norm_backward_general_sums, given, shape, call.device, call.stream);
    return error || plan.kinds == 0 ? error : add_partials(a, plan.kinds, plan.blocks, call);
  };
  int error = 0;
  if (given.terms) {  // the sums need them, and come before anything is written: a result may stand where an input does
    GeneralNorm terms = given;
    terms.norm.grad_x = terms.norm.grad_dropped = nullptr;
    bool over = false;
    for (const void* const result : {a.grad_x, a.grad_dropped}) {
      over = over || (result && (result == a.x || result == a.grad_y || result == a.grad_sum));
    }
    error = rows(over ? terms : given);
    if (!error) error = sums();
    return error || !over ? error : rows(given);
  }
  if (plan.column_blocks > 0) error = sums();
  return error || !a.wants_rows() ? error : rows(given);
}

}  // namespace fuseline
