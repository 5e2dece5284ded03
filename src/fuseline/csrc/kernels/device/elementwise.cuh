// The walk of the elementwise kernels: tensors as rows of accesses of some elements (8 or 16 bytes, or one element where
// addresses or sizes do not keep to such steps), and how threads are laid over them.
//
// A thread has one position of a row, so that what depends on the column alone (a bias) is loaded once, and some rows
// with all their loads in flight before the first use. Threads with neighbouring positions are neighbours; a block
// that is through makes room for the next: those on the chip are then neighbours in memory too, and it serves them 8%
// faster than blocks that stay.
#pragma once

#include "../plans/elementwise.h"
#include "few_rows.cuh"
#include "launch.cuh"
#include "overlap.cuh"
#include "weights.cuh"

namespace fuseline {

// Division by a constant of the launch: one multiplication (Granlund and Montgomery 1994, figure 4.1, N = 32).
struct Divisor {
  uint32_t value = 1, factor = 0;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t by) : value(by) {
    while (shift < 32 && (uint64_t(1) << shift) < by) ++shift;
    factor = uint32_t((((uint64_t(1) << shift) - by) << 32) / by + 1);
  }
  static Divisor by_more_than_all() {  // finds 0 for every number
    Divisor divisor;
    divisor.shift = 32;
    return divisor;
  }
  __device__ __forceinline__ uint32_t divide(uint32_t number) const {
    const uint32_t high = __umulhi(number, factor);
    return uint32_t((uint64_t(high) + number) >> shift);
  }
};

struct Walk {
  Divisor positions;       // accesses in a row
  int64_t groups = 0;      // of rows, one for each thread of a position
  int64_t row_elements = 0;
  int64_t elements = 0;    // of all rows; the last row may end early
  int64_t row_factor = 1;  // a group starts at row group * row_factor,
  int64_t row_step = 1;    // and its rows stand this far apart,
  int64_t step = 0;        // in elements

  Walk() = default;
  explicit Walk(const WalkPlan& plan)
      : positions(uint32_t(plan.positions)),
        groups(plan.groups),
        row_elements(plan.row_elements),
        elements(plan.elements),
        row_factor(plan.row_factor),
        row_step(plan.row_step),
        step(plan.row_step * plan.row_elements) {}
};

// Elements of 8 bytes.
template <class T>
constexpr int kHalfVector = kVector<T> / 2;

template <class T, int kWide>
using Raw = std::conditional_t<kWide == kVector<T>, uint4, std::conditional_t<kWide == kHalfVector<T>, uint2, T>>;

// 16 bytes go past the L1, smaller accesses through it.
template <class T, int kWide>
__device__ __forceinline__ Raw<T, kWide> load_wide(const T* at) {
  if constexpr (kWide == kVector<T>) {
    return load_once(at);
  } else {
    return *reinterpret_cast<const Raw<T, kWide>*>(at);
  }
}

template <class T, int kWide>
__device__ __forceinline__ void widen(const Raw<T, kWide>& raw, float (&values)[kWide]) {
  if constexpr (kWide == kVector<T>) {
    unpack<T>(raw, values);
  } else if constexpr (kWide == 4) {
    const float2 low = unpack_pair<T>(raw.x), high = unpack_pair<T>(raw.y);
    values[0] = low.x, values[1] = low.y, values[2] = high.x, values[3] = high.y;
  } else if constexpr (kWide == 2) {
    values[0] = __uint_as_float(raw.x), values[1] = __uint_as_float(raw.y);
  } else {
    values[0] = to_float(raw);
  }
}

template <class T, int kWide>
__device__ __forceinline__ void store_wide(T* at, const float (&values)[kWide]) {
  Raw<T, kWide> raw;
  if constexpr (kWide == kVector<T>) {
    raw = pack<T>(values);
  } else if constexpr (kWide == 4) {
    raw = make_uint2(pack_pair<T>(values[0], values[1]), pack_pair<T>(values[2], values[3]));
  } else if constexpr (kWide == 2) {
    raw = make_uint2(__float_as_uint(values[0]), __float_as_uint(values[1]));
  } else {
    raw = from_float<T>(values[0]);
  }
  *reinterpret_cast<Raw<T, kWide>*>(at) = raw;
}

// Weights of columns first .. first + kWide, where columns repeat every n; zero without weights. `vectors`: they can be
// read 16 bytes at a time, which no repetition divides.
template <class T, int kWide>
__device__ __forceinline__ void load_repeated(const void* weights, bool fp32, bool vectors, int64_t first, int64_t n,
                                              float (&values)[kWide]) {
#pragma unroll
  for (int i = 0; i < kWide; ++i) values[i] = 0.f;
  if (!weights) return;
  if constexpr (kWide > 1) {
    if (vectors) {
      const int64_t column = first < n ? first : int64_t(uint32_t(first) % uint32_t(n));  // only short rows are repeated
      load_weights<T, true>(weights, fp32, column, n, values);
      return;
    }
  }
  int64_t column = first % n;
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    values[i] = fp32 ? static_cast<const float*>(weights)[column] : to_float(static_cast<const T*>(weights)[column]);
    if (++column == n) column = 0;
  }
}

// F::apply(in, bias, out) of each of kWide elements.
template <class F, int kWide>
__device__ __forceinline__ void apply_each(const float (&in)[F::kIn][kWide], const float (&bias)[kWide],
                                           float (&out)[F::kOut][kWide]) {
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    float of_one[F::kIn], result[F::kOut];
#pragma unroll
    for (int s = 0; s < F::kIn; ++s) of_one[s] = in[s][i];
    F::apply(of_one, bias[i], result);
#pragma unroll
    for (int s = 0; s < F::kOut; ++s) out[s][i] = result[s];
  }
}

template <int kIn, int kOut>
struct Streams {
  const void* in[kIn];
  void* out[kOut];
  const void* bias;        // null for none
  int64_t bias_n;          // its elements, which repeat along a row
  bool fp32_bias;
  bool bias_vectors;
  bool whole;              // the tensors begin at multiples of 8 bytes; else elements are read and written one by one
  Walk walk;
};

// F::apply(in, bias, out) of every element of tensors without gaps, in accesses of 8 bytes. F has kIn, kOut and kRows.
template <class F, class T>
__global__ void __launch_bounds__(kElementwiseBlock) elementwise(const Streams<F::kIn, F::kOut> a) {
  constexpr int kRows = F::kRows, kWide = kHalfVector<T>;
  let_next_start();
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t group = a.walk.positions.divide(thread);
  const int64_t first = int64_t(thread - group * a.walk.positions.value) * kWide;
  const int64_t at = group * a.walk.row_factor * a.walk.row_elements + first, last = a.walk.elements - kWide;
  const T* in[F::kIn];
  T* out[F::kOut];
  uint64_t known = uint64_t(last) + number(a.bias);
#pragma unroll
  for (int s = 0; s < F::kIn; ++s) in[s] = static_cast<const T*>(a.in[s]) + at, known += number(in[s]);
#pragma unroll
  for (int s = 0; s < F::kOut; ++s) out[s] = static_cast<T*>(a.out[s]) + at, known += number(out[s]);
  known_by_now(known);
  wait_for_earlier();

  const auto apply_one = [&](int64_t element) {
    float of[F::kIn][1], result[F::kOut][1], one[1];
#pragma unroll
    for (int s = 0; s < F::kIn; ++s) of[s][0] = to_float(static_cast<const T*>(a.in[s])[element]);
    load_repeated<T, 1>(a.bias, a.fp32_bias, false, a.bias ? element % a.bias_n : 0, a.bias_n, one);
    apply_each<F>(of, one, result);
#pragma unroll
    for (int s = 0; s < F::kOut; ++s) static_cast<T*>(a.out[s])[element] = from_float<T>(result[s][0]);
  };
  if (!a.whole) {
#pragma unroll 1
    for (int i = 0; i < kRows * kWide; ++i) {
      const int64_t element = at + i / kWide * a.walk.step + i % kWide;
      if (element < a.walk.elements) apply_one(element);
    }
    return;
  }
  Raw<T, kWide> raw[kRows][F::kIn];
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (at + u * a.walk.step > last) continue;
#pragma unroll
    for (int s = 0; s < F::kIn; ++s) raw[u][s] = load_wide<T, kWide>(in[s] + u * a.walk.step);
  }
  float bias[kWide];
  load_repeated<T, kWide>(a.bias, a.fp32_bias, a.bias_vectors, first, a.bias_n, bias);
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (at + u * a.walk.step > last) continue;
    float of[F::kIn][kWide], result[F::kOut][kWide];
#pragma unroll
    for (int s = 0; s < F::kIn; ++s) widen<T, kWide>(raw[u][s], of[s]);
    apply_each<F>(of, bias, result);
#pragma unroll
    for (int s = 0; s < F::kOut; ++s) store_wide<T, kWide>(out[s] + u * a.walk.step, result[s]);
  }

  // The last few elements, if they do not fill an access.
  const int64_t rest = a.walk.elements % kWide;
  if (thread < rest) apply_one(a.walk.elements - rest + thread);
}

template <class F, class T>
int launch_elementwise(Streams<F::kIn, F::kOut>& a, const WalkPlan& walk, const LaunchShape& shape, const Device& device,
                       void* stream) {
  a.walk = Walk(walk);
  return launch(elementwise<F, T>, a, shape, device, stream);
}

}  // namespace fuseline
