// The arithmetic of the norms' backward, for the elements that one thread has of a row. With x_hat = (x - mean) * rstd
// (mean 0 in an RMS norm) and g = grad_y:
//   grad_x = rstd * (g * w - mean(g * w) - x_hat * mean(g * w * x_hat)) + grad_sum   (no mean(g * w) in an RMS norm)
//   grad_weight = sum over rows of g * x_hat, grad_bias = sum over rows of g
// and where x was residual + dropout(x0 + x_bias): grad_dropped = grad_x through the mask, grad_x_bias = its sum.
//
// The first pass over a row gives the two sums that the row has to agree on, and adds to the sums over rows; the second,
// once the sums are known, gives the gradient of the row.
#pragma once

#include "meeting.cuh"
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

// Sums over the rows of chains (chains.cuh), from the registers of a block's threads into rows of partial sums. Each
// thread leaves those of a chain in shared memory, and comes back to add up its share of the columns over the block's
// groups when it is through with the next chain, so that nobody waits for anybody. Across threads they are added in fp64.
template <class Kind>
struct PartialSums {
  static constexpr int kSize = kVector<typename Kind::Y>, kSlots = Kind::kSlots, kSums = Kind::kSums;
  float* parts;         // two sets of [sums][parts][columns of the block]
  uint64_t* barriers;   // at which a set is complete

  __device__ __forceinline__ int rows_a_part() const { return Kind::kOneWarp ? kWarp / int(blockDim.x) : 1; }
  __device__ __forceinline__ int count() const { return int(blockDim.y) / rows_a_part(); }
  __device__ __forceinline__ int columns() const { return int(blockDim.x) * kSlots * kSize; }

  // Leaves the sums of chain number `number` of this block, and begins new ones.
  __device__ __forceinline__ void leave(ColumnSums<kSize, kSums> (&sums)[kSlots], int number) const {
    leave_kind(sums, [](auto& of) -> float (&)[kSize] { return of.weight; }, 0, number);
    if constexpr (kSums > 1) {
      leave_kind(sums, [](auto& of) -> float (&)[kSize] { return of.bias; }, 1, number);
    }
    if constexpr (kSums > 2) {
      leave_kind(sums, [](auto& of) -> float (&)[kSize] { return of.x_bias; }, 2, number);
    }
    barrier_arrive(&barriers[number % 2]);
  }

  // This thread's share of what all have left of it.
  __device__ __forceinline__ void add(const NormBackward& a, int chain, int number) const {
    barrier_wait(&barriers[number % 2], number / 2 % 2);
    const int from = Kind::kOneWarp ? 0 : (int(blockIdx.x) & (a.cluster - 1)) * columns();  // the block's first column
    const int width = columns(), all = int(blockDim.x * blockDim.y), n = int(a.n);
#pragma unroll 1
    for (int kind = 0; kind < kSums; ++kind) {
      const float* const set = parts + (number % 2 * kSums + kind) * count() * width;
      float* const to = a.partials + (int64_t(kind) * a.slots + chain) * a.columns + from;
#pragma unroll 1
      for (int c = int(threadIdx.y * blockDim.x + threadIdx.x); c < width && from + c < n; c += all) {
        double sum = 0.0;
#pragma unroll 4
        for (int part = 0; part < count(); ++part) sum += set[part * width + c];
        to[c] = float(sum);
      }
    }
  }

 private:
  template <class Which>
  __device__ __forceinline__ void leave_kind(ColumnSums<kSize, kSums> (&sums)[kSlots], Which&& which, int kind,
                                             int number) const {
    const int step = int(blockDim.x) * kSize;
    const int part = int(threadIdx.y) / rows_a_part();
    float* const to = parts + ((number % 2 * kSums + kind) * count() + part) * columns() + int(threadIdx.x) * kSize;
    const bool writes = !Kind::kOneWarp || int(threadIdx.y) % rows_a_part() == 0;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      float(&mine)[kSize] = which(sums[k]);
      if constexpr (Kind::kOneWarp) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          double sum = mine[i];
          for (int by = int(blockDim.x); by < kWarp; by *= 2) sum += __shfl_xor_sync(kAllLanes, sum, by);
          mine[i] = float(sum);
        }
      }
#pragma unroll
      for (int i = 0; i < kSize; i += 4) {
        if (writes) {
          *reinterpret_cast<float4*>(to + k * step + i) = make_float4(mine[i], mine[i + 1], mine[i + 2], mine[i + 3]);
        }
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) mine[i] = 0.f;
    }
  }
};

}  // namespace fuseline
