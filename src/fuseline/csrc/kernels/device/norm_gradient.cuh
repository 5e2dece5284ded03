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

  // From the sums of g * w and of g * w * (x - mean). Of one element alone nothing is left of x - mean, nor of its
  // gradient; below, rounding would be.
  __device__ __forceinline__ void set(const NormBackward& a, bool centred, float sum, float product_sum) {
    scale = centred && a.n == 1 ? 0.f : rstd;
    offset = centred ? scale * (sum * a.inverse_n) : 0.f;
    slope = scale * rstd * (rstd * product_sum * a.inverse_n);
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

// Adds the sums of all rows that a block had, and writes them as its partial sums. `parts` holds a value for each
// column of each warp, or of each group of warps, that has its own sums. Across threads they are added in fp64.
template <int kColumns, int kWide>
__device__ __forceinline__ void write_partials(const float (&sums)[kColumns], float* parts, float* partials, int from,
                                               int n, int start, int step) {
  const int threads = blockDim.x;
  const int tid = threadIdx.y * threads + threadIdx.x;
  const int columns = threads * kColumns;
  const int rows_a_part = threads < kWarp ? kWarp / threads : 1;
  const int part = threadIdx.y / rows_a_part;
  const int all = threads * int(blockDim.y);
  __syncthreads();  // what stood there, or the sums before these, are done with
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    double sum = sums[c];
    for (int by = threads; by < kWarp; by *= 2) sum += __shfl_xor_sync(kAllLanes, sum, by);
    if (int(threadIdx.y) % rows_a_part == 0) {
      parts[part * columns + start - from + c / kWide * step + c % kWide] = float(sum);
    }
  }
  __syncthreads();
  const int count = int(blockDim.y) / rows_a_part;
  for (int c = tid; c < columns && from + c < n; c += all) {
    double sum = 0.0;
    for (int p = 0; p < count; ++p) sum += parts[p * columns + c];
    partials[from + c] = float(sum);
  }
}

}  // namespace fuseline
