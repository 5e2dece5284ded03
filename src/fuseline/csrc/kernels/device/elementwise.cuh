// The walk of the elementwise kernels: tensors as rows of accesses of kWide elements (16 bytes, or one element where
// addresses or sizes do not keep to 16-byte steps), and how threads are laid over them.
//
// A thread has one position of a row, so that what depends on the column alone (a bias) is loaded once, and kRows rows
// with all their loads in flight before the first use. Threads with neighbouring positions are neighbours; a block
// that is through makes room for the next, which keeps memory busier than a fixed grid with a last round that is half
// empty.
#pragma once

#include "launch.cuh"
#include "overlap.cuh"
#include "weights.cuh"

namespace fuseline {

constexpr int kElementwiseBlock = 256;
constexpr int kLeastBlock = 64;

// Division by a constant of the launch: one multiplication (Granlund and Montgomery 1994, figure 4.1, N = 32).
struct Divisor {
  uint32_t value = 1, factor = 0;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t by) : value(by) {
    while (shift < 32 && (uint64_t(1) << shift) < by) ++shift;
    factor = uint32_t((((uint64_t(1) << shift) - by) << 32) / by + 1);
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
};

// `rows_a_thread`: kRows. Where there are too few rows to fill the device so, a thread gets one.
inline Walk plan_walk(int64_t elements, int64_t row_elements, int wide, int rows_a_thread, const Device& device) {
  Walk walk;
  walk.elements = elements, walk.row_elements = row_elements;
  const int64_t positions = row_elements / wide;
  const int64_t rows = divide_up(elements, row_elements);
  walk.positions = Divisor(uint32_t(positions));
  const bool few = positions * rows < int64_t(rows_a_thread) * kElementwiseBlock * device.processors * 2;
  walk.row_factor = few ? 1 : rows_a_thread;
  walk.row_step = few ? rows : 1;
  walk.step = walk.row_step * row_elements;
  walk.groups = divide_up(rows, walk.row_factor);
  return walk;
}

// Threads of a block: fewer where so many multiprocessors would otherwise be without one.
inline int block_for(int64_t threads, const Device& device) {
  int block = kElementwiseBlock;
  while (block > kLeastBlock && 2 * divide_up(threads, block) <= device.processors) block /= 2;
  return block;
}

// A flat tensor as rows of one block's width.
template <int kWide>
constexpr int64_t kFlatRow = int64_t(kElementwiseBlock) * kWide;

template <class T, int kWide>
using Raw = std::conditional_t<(kWide > 1), uint4, T>;

template <class T, int kWide>
__device__ __forceinline__ Raw<T, kWide> load_wide(const T* at) {
  if constexpr (kWide > 1) {
    static_assert(kWide == kVector<T>);
    return load_once(at);
  } else {
    return *at;
  }
}

template <class T, int kWide>
__device__ __forceinline__ void widen(const Raw<T, kWide>& raw, float (&values)[kWide]) {
  if constexpr (kWide > 1) {
    unpack<T>(raw, values);
  } else {
    values[0] = to_float(raw);
  }
}

template <class T, int kWide>
__device__ __forceinline__ void store_wide(T* at, const float (&values)[kWide]) {
  if constexpr (kWide > 1) {
    *reinterpret_cast<uint4*>(at) = pack<T>(values);
  } else {
    *at = from_float<T>(values[0]);
  }
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

template <int kIn, int kOut>
struct Streams {
  const void* in[kIn];
  int64_t in_stride[kIn];  // elements from row to row; the rows of `walk`
  int64_t in_step[kIn];    // elements between the rows of a thread
  void* out[kOut];         // null where not wanted
  int64_t out_stride[kOut];
  int64_t out_step[kOut];
  const void* bias;        // null for none
  int64_t bias_n;          // its elements, which repeat along a row
  bool fp32_bias;
  bool bias_vectors;
  Walk walk;
};

// Rows of a thread: F::kRows of 16 bytes, more of single elements.
template <class F, int kWide>
constexpr int kRowsOf = kWide > 1 ? F::kRows : 8;

// F::apply(in, bias, out) of every element. F has kIn, kOut and kRows.
template <class F, class T, int kWide>
__global__ void __launch_bounds__(kElementwiseBlock, 4) elementwise(const Streams<F::kIn, F::kOut> a) {
  constexpr int kRows = kRowsOf<F, kWide>;
  let_next_start();
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t group = a.walk.positions.divide(thread);
  int64_t first = int64_t(thread - group * a.walk.positions.value) * kWide;
  int64_t row = int64_t(group) * a.walk.row_factor;
  make_ready(first), make_ready(row);
  wait_for_earlier();

  Raw<T, kWide> raw[kRows][F::kIn];
  const int64_t end = row * a.walk.row_elements + first + kWide;
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (end + u * a.walk.step > a.walk.elements) continue;
#pragma unroll
    for (int s = 0; s < F::kIn; ++s) {
      const T* in = static_cast<const T*>(a.in[s]) + row * a.in_stride[s] + first;
      raw[u][s] = load_wide<T, kWide>(in + u * a.in_step[s]);
    }
  }
  float bias[kWide];
  load_repeated<T, kWide>(a.bias, a.fp32_bias, a.bias_vectors, first, a.bias_n, bias);
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (end + u * a.walk.step > a.walk.elements) continue;
    float in[F::kIn][kWide], out[F::kOut][kWide];
#pragma unroll
    for (int s = 0; s < F::kIn; ++s) widen<T, kWide>(raw[u][s], in[s]);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      float of_one[F::kIn], result[F::kOut];
#pragma unroll
      for (int s = 0; s < F::kIn; ++s) of_one[s] = in[s][i];
      F::apply(of_one, bias[i], result);
#pragma unroll
      for (int s = 0; s < F::kOut; ++s) out[s][i] = result[s];
    }
#pragma unroll
    for (int s = 0; s < F::kOut; ++s) {
      T* const to = static_cast<T*>(a.out[s]) + row * a.out_stride[s] + first;
      if (a.out[s]) store_wide<T, kWide>(to + u * a.out_step[s], out[s]);
    }
  }

  // The last few elements, if they do not fill an access. Only rows without gaps can end so.
  const int64_t rest = a.walk.elements % kWide;
  if (kWide > 1 && thread < rest) {
    const int64_t at = a.walk.elements - rest + thread;
    float in[F::kIn], result[F::kOut];
#pragma unroll
    for (int s = 0; s < F::kIn; ++s) in[s] = to_float(static_cast<const T*>(a.in[s])[at]);
    float one[1];
    load_repeated<T, 1>(a.bias, a.fp32_bias, false, a.bias ? at % a.bias_n : 0, a.bias_n, one);
    F::apply(in, one[0], result);
#pragma unroll
    for (int s = 0; s < F::kOut; ++s) {
      if (a.out[s]) static_cast<T*>(a.out[s])[at] = from_float<T>(result[s]);
    }
  }
}

// Whether every pointer that is there stands at a multiple of 16 bytes, and every row too.
template <class T, int kIn, int kOut>
bool in_vectors(const Streams<kIn, kOut>& a) {
  const auto fits = [](const void* at, int64_t stride) {
    return offset_in_vector(at) == 0 && stride % kVector<T> == 0;
  };
  bool all = true;
  for (int s = 0; s < kIn; ++s) all = all && fits(a.in[s], a.in_stride[s]);
  for (int s = 0; s < kOut; ++s) all = all && fits(a.out[s], a.out_stride[s]);
  return all;
}

template <class F, class T, int kWide>
int run_elementwise(Streams<F::kIn, F::kOut>& a, int64_t elements, int64_t row_elements, const Device& device,
                    void* stream) {
  a.walk = plan_walk(elements, row_elements, kWide, kRowsOf<F, kWide>, device);
  for (int s = 0; s < F::kIn; ++s) a.in_step[s] = a.in_stride[s] * a.walk.row_step;
  for (int s = 0; s < F::kOut; ++s) a.out_step[s] = a.out_stride[s] * a.walk.row_step;
  const int64_t threads = a.walk.groups * a.walk.positions.value;
  const int block = block_for(threads, device);
  return launch(elementwise<F, T, kWide>, a, divide_up(threads, block), dim3(unsigned(block)), 0, 1, stream,
                device.clusters);
}

}  // namespace fuseline
