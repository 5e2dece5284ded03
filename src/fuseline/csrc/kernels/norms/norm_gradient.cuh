// The arithmetic of the norms' backward, for the elements that one thread has of a row. With x_hat = (x - mean) * rstd
// (mean 0 in an RMS norm) and g = grad_y:
//   grad_x = rstd * (g * w - mean(g * w) - x_hat * mean(g * w * x_hat)) + grad_sum   (no mean(g * w) in an RMS norm)
//   grad_weight = sum over rows of g * x_hat, grad_bias = sum over rows of g
// and where x was residual + dropout(x0 + x_bias): grad_dropped = grad_x through the mask, grad_x_bias = its sum.
//
// The first pass over a row gives the two sums that the row has to agree on, and adds to the sums over rows; the second,
// once the sums are known, gives the gradient of the row.
#pragma once

#include "norm.cuh"

namespace fuseline {

// What a row's gradient is made of besides its elements.
struct RowTerms {
  float mean, rstd;
  float scale, offset, slope;  // grad_x = g * w * scale - offset - (x - mean) * slope

  // What takes x - mean to x_hat: an x that is normalized is x_hat, and its mean is 0.
  __device__ __forceinline__ static float unit(const NormBackward& a, float rstd) { return a.normalized ? 1.f : rstd; }

  // From the sums of g * w and of g * w * (x - mean). Of one element alone nothing is left of x - mean, nor of its
  // gradient; below, rounding would be.
  __device__ __forceinline__ void set(const NormBackward& a, bool centred, float sum, float product_sum) {
    scale = centred && a.n == 1 ? 0.f : rstd;
    offset = centred ? scale * (sum * a.inverse_n) : 0.f;
    const float to_x_hat = unit(a, rstd);
    slope = scale * to_x_hat * (to_x_hat * product_sum * a.inverse_n);
  }
};

// The sums over rows of one slot's columns.
template <int kSize, int kSums>
struct ColumnSums {
  float weight[kSize], bias[kSums > 1 ? kSize : 1], x_bias[kSums > 2 ? kSize : 1];
};

template <int kSize, int kSums, bool kCentred>
__device__ __forceinline__ void first_pass(const float (&x)[kSize], const float (&grad)[kSize],
                                           const float (&weight)[kSize], float mean, float rstd,
                                           ColumnSums<kSize, kSums>& columns, float& sum, float& product_sum) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float product = grad[i] * (kCentred ? x[i] - mean : x[i]);
    columns.weight[i] += product * rstd;
    if constexpr (kSums > 1) columns.bias[i] += grad[i];
    if constexpr (kCentred) sum += grad[i] * weight[i];
    product_sum += product * weight[i];
  }
}

// grad becomes the gradient of what was normalized.
template <int kSize, bool kCentred>
__device__ __forceinline__ void second_pass(const float (&x)[kSize], const float (&weight)[kSize], const RowTerms& row,
                                            float (&grad)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float weighted = grad[i] * weight[i];
    grad[i] = kCentred ? weighted * row.scale - row.offset - (x[i] - row.mean) * row.slope
                       : weighted * row.scale - x[i] * row.slope;
  }
}

// Weights of columns first .. first + kSize, in either dtype, with kAnywhere at any address; ones where there are none,
// zeros outside the row.
template <class Y, bool kAnywhere, int kSize>
__device__ __forceinline__ void weights_of_columns(const NormBackward& a, int first, float (&weight)[kSize]) {
  const int n = int(a.n);
#pragma unroll
  for (int i = 0; i < kSize; ++i) weight[i] = !a.weight && first + i < n ? 1.f : 0.f;
  if (!a.weight || first >= n) return;
  load_weights<Y, !kAnywhere>(a.weight, a.fp32_weights, first, n, weight);
}

// Adds up the sums of all rows that a block had, and writes them as its row of partial sums. `parts` has room for
// [sums][parts][columns of the block], a part being a group of warps, or of lanes, that has sums of its own. Across
// threads they are added in fp64.
template <class Kind>
__device__ __forceinline__ void write_partials(
    const NormBackward& a, ColumnSums<kVector<typename Kind::Y>, Kind::kSums> (&sums)[Kind::kSlots], float* parts,
    int block) {
  constexpr int kSize = kVector<typename Kind::Y>, kSlots = Kind::kSlots, kSums = Kind::kSums;
  const int threads = blockDim.x, all = threads * int(blockDim.y), n = int(a.n);
  const int rows_a_part = Kind::kOneWarp ? kWarp / threads : 1;
  const int count = int(blockDim.y) / rows_a_part, part = int(threadIdx.y) / rows_a_part;
  const int width = threads * kSlots * kSize, step = threads * kSize;
  const bool writes = !Kind::kOneWarp || int(threadIdx.y) % rows_a_part == 0;
  const auto leave = [&](auto&& which, int kind) {
    float* const to = parts + (kind * count + part) * width + int(threadIdx.x) * kSize;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      float(&mine)[kSize] = which(sums[k]);
      if constexpr (Kind::kOneWarp) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          double sum = mine[i];
          for (int by = threads; by < kWarp; by *= 2) sum += __shfl_xor_sync(kAllLanes, sum, by);
          mine[i] = float(sum);
        }
      }
#pragma unroll
      for (int i = 0; i < kSize; i += 4) {
        const float4 four = make_float4(mine[i], mine[i + 1], mine[i + 2], mine[i + 3]);
        if (writes) *reinterpret_cast<float4*>(to + k * step + i) = four;
      }
    }
  };
  leave([](auto& of) -> float (&)[kSize] { return of.weight; }, 0);
  if constexpr (kSums > 1) leave([](auto& of) -> float (&)[kSize] { return of.bias; }, 1);
  if constexpr (kSums > 2) leave([](auto& of) -> float (&)[kSize] { return of.x_bias; }, 2);
  __syncthreads();
  const int cluster = Kind::kOneWarp ? 1 : a.cluster;
  const int from = (int(blockIdx.x) & (cluster - 1)) * width;  // the block's first column
  const int64_t kind_step = int64_t(gridDim.x) / cluster * a.columns;
#pragma unroll 1
  for (int kind = 0; kind < kSums; ++kind) {
    const float* const set = parts + kind * count * width;
    float* const to = a.partials + kind * kind_step + block * a.columns + from;
#pragma unroll 1
    for (int c = int(threadIdx.y) * threads + int(threadIdx.x); c < width && from + c < n; c += all) {
      double sum = 0.0;
#pragma unroll 4
      for (int p = 0; p < count; ++p) sum += set[p * width + c];
      to[c] = float(sum);
    }
  }
}

}  // namespace fuseline
