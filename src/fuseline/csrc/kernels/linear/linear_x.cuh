// Activations of a linear layer in shared memory, as the B of its products reads them: [row of x][columns of k], rows a
// pitch apart that lets eight of them be read at once. Zeros stand past the columns that there are.
#pragma once

#include "linear_call.cuh"
#include "device/meeting.cuh"
#include "device/waiting.cuh"

namespace fuseline {

// Bytes from row to row.
__device__ constexpr int x_pitch(int chunks) { return chunks * kTileColumns * 2 + kRowGap; }

// Eight elements of 16 bits, `first` and on, of a row of n at any address; zeros for those that it has not. Two vectors of
// memory hold them, which are loaded whole where the row holds both.
__device__ __forceinline__ uint4 load_eight(const char* row, int first, int n) {
  const char* const at = row + int64_t(first) * 2;
  const int off = int(uintptr_t(at) % 16) / 2;
  if (first >= off && first - off + 16 <= n) {
    const uint4* const from = reinterpret_cast<const uint4*>(at - 2 * off);
    const uint4 low = __ldg(from), high = __ldg(from + 1);
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = off & 4 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = off & 2 ? words[i + 1] : words[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], off % 2 * 16);
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (first + e >= 0 && first + e < n) {
      words[e / 2] |= uint32_t(reinterpret_cast<const uint16_t*>(at)[e]) << (16 * (e % 2));
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Which 16 bytes (8 columns) of a stretch of x a thread moves: one row, one quad of every `step`-th half chunk.
template <int kThreads>
struct StretchOfRows {
  int row, now, step, count, first, limit;
  uint32_t to;

  // `rows` of x, `chunks` of 64 columns from chunk `begin` on, of which those before column `limit` are there.
  __device__ __forceinline__ StretchOfRows(uint32_t shared, int rows, int begin, int chunks, int limit_)
      : count(2 * chunks), first(begin * kTileColumns + int(threadIdx.x) % 4 * 8), limit(limit_) {
    const int row_bits = rows == 1 ? 0 : 32 - __clz(rows - 1);  // threads for rows, a power of two
    row = (int(threadIdx.x) / 4) & ((1 << row_bits) - 1);
    now = row < rows ? (int(threadIdx.x) / 4) >> row_bits : count;
    step = (kThreads / 4) >> row_bits;
    to = shared + row * x_pitch(chunks) + int(threadIdx.x) % 4 * 16;
  }
  __device__ __forceinline__ int column(int half) const { return first + half * 32; }
  __device__ __forceinline__ uint32_t place(int half) const { return to + half * 64; }
};

// Rows of x at any addresses, `chunks` of 64 columns from chunk `begin` on, of which those before column `limit` are there.
// Each warp has neighbouring vectors, which share lines of memory where they begin between two.
template <int kThreads>
__device__ __forceinline__ void load_rows(const LinearArguments& a, uint32_t shared, int begin, int chunks, int limit) {
  constexpr int kTogether = 4;
  const int vectors = chunks * (kTileColumns / 8), count = a.m * vectors;
  for (int first = threadIdx.x; first < count; first += kTogether * kThreads) {
    uint4 raw[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = first + u * kThreads, row = i / vectors;
      if (i < count) raw[u] = load_eight(a.x + row * a.x_stride, begin * kTileColumns + 8 * (i - row * vectors), limit);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = first + u * kThreads, row = i / vectors;
      if (i < count) store_shared(shared + row * x_pitch(chunks) + 16 * (i - row * vectors), raw[u]);
    }
  }
}

// The same by Hopper's copy engine, for rows of x at multiples of 16 bytes; all that is there arrives at the barrier.
template <int kThreads>
__device__ __forceinline__ void fetch_rows(const LinearArguments& a, char* shared, uint64_t* arrived, int begin, int chunks,
                                           int limit) {
  const int thread = threadIdx.x, first = begin * kTileColumns, there = limit - first;
  if (thread < kWarp) {
    if (thread == 0) barrier_expect(arrived, a.m * there * 2);
    __syncwarp();
    for (int row = thread; row < a.m; row += kWarp) {
      copy_in(shared + row * x_pitch(chunks), a.x + row * a.x_stride + int64_t(first) * 2, there * 2, arrived);
    }
  }
  const int past = chunks * kTileColumns - there;  // a multiple of 8
  for (int i = thread; i < a.m * (past / 8); i += kThreads) {
    const int row = i / (past / 8), vector = i - row * (past / 8);
    *reinterpret_cast<uint4*>(shared + row * x_pitch(chunks) + there * 2 + vector * 16) = make_uint4(0, 0, 0, 0);
  }
}

// One row, of which this block has all columns: each thread norms what it fetched, in the place where it belongs. `room`
// holds two floats for each warp, and x has room for two rows.
template <class T, int kThreads>
__device__ __forceinline__ void load_normed_row(const LinearArguments& a, float* room, const StretchOfRows<kThreads>& of) {
  constexpr int kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  // The norm's weights come beside x, to where a second row would be: asked for when the sums are there, they would be
  // waited for.
  const uint32_t beside = x_pitch(of.count / 2);
  for (int half = of.now; half < of.count && of.column(half) < of.limit; half += of.step) {
    copy_async(of.place(half) + beside, a.norm_weight + int64_t(of.column(half)) * 2);
  }
  commit_copies();
  constexpr int kTogether = 4;
  for (int now = of.now; now < of.count; now += kTogether * of.step) {
    uint4 raw[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int half = now + u * of.step;
      raw[u] = make_uint4(0, 0, 0, 0);
      if (half < of.count && of.column(half) < of.limit) raw[u] = *reinterpret_cast<const uint4*>(a.x + int64_t(of.column(half)) * 2);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int half = now + u * of.step;
      if (half < of.count) store_shared(of.place(half), raw[u]);
    }
  }
  const auto sum_of_block = [&](float* to, const auto& term) {
    float sum = 0.f;
    for (int half = of.now; half < of.count && of.column(half) < of.limit; half += of.step) {
      float values[8];
      unpack<T>(load_shared(of.place(half)), values);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += term(values[e]);
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) to[warp] = sum;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += to[w];
    return sum;
  };
  const float mean = a.norm == FUSELINE_NORM_LAYER ? sum_of_block(room, [](float x) { return x; }) / a.k : 0.f;
  const float squares = sum_of_block(room + kWarps, [&](float x) { return (x - mean) * (x - mean); });
  const float rstd = rsqrtf(squares / a.k + a.eps);
  wait_for_copies<0>();
  for (int half = of.now; half < of.count && of.column(half) < of.limit; half += of.step) {
    float values[8], weight[8], shift[8] = {};
    unpack<T>(load_shared(of.place(half)), values);
    unpack<T>(load_shared(of.place(half) + beside), weight);
    if (a.norm_bias) unpack<T>(__ldg(reinterpret_cast<const uint4*>(a.norm_bias + int64_t(of.column(half)) * 2)), shift);
#pragma unroll
    for (int e = 0; e < 8; ++e) values[e] = fmaf((values[e] - mean) * rstd, weight[e], shift[e]);
    store_shared(of.place(half), pack<T>(values));
  }
}

// Rows normed over all of k. `room` holds a float for each warp and row of x and two for each row.
template <class T, int kThreads>
__device__ __forceinline__ void load_normed_rows(const LinearArguments& a, float* room, StretchOfRows<kThreads> of) {
  constexpr int kWarps = kThreads / kWarp;
  if (a.m == 1 && a.splits == 1) {
    load_normed_row<T>(a, room, of);
    return;
  }
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  float2* const moments = reinterpret_cast<float2*>(room);  // mean and 1 / standard deviation
  float* const partial = room + 2 * a.m;
  const bool layer = a.norm == FUSELINE_NORM_LAYER;
  for (int centred = layer ? 0 : 1; centred < 2; ++centred) {  // the mean, then squares around it
    for (int row = 0; row < a.m; ++row) {
      const float mean = layer && centred ? moments[row].x : 0.f;
      float sum = 0.f;
      for (int i = thread; i < a.k / 8; i += kThreads) {
        float values[8];
        unpack<T>(*reinterpret_cast<const uint4*>(a.x + row * a.x_stride + int64_t(i) * 16), values);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float off = values[e] - mean;
          sum = centred ? fmaf(off, off, sum) : sum + off;
        }
      }
#pragma unroll
      for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane == 0) partial[row * kWarps + warp] = sum;
    }
    __syncthreads();
    for (int row = thread; row < a.m; row += kThreads) {
      float sum = 0.f;
      for (int w = 0; w < kWarps; ++w) sum += partial[row * kWarps + w];
      sum /= a.k;
      moments[row] = centred ? make_float2(layer ? moments[row].x : 0.f, rsqrtf(sum + a.eps)) : make_float2(sum, 0.f);
    }
    __syncthreads();
  }
  const char* const x = a.x + of.row * a.x_stride;
  for (; of.now < of.count; of.now += of.step) {
    const int column = of.column(of.now);
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (column < of.limit) {
      float values[8], weight[8], shift[8] = {};
      unpack<T>(*reinterpret_cast<const uint4*>(x + int64_t(column) * 2), values);
      unpack<T>(__ldg(reinterpret_cast<const uint4*>(a.norm_weight + int64_t(column) * 2)), weight);
      if (a.norm_bias) unpack<T>(__ldg(reinterpret_cast<const uint4*>(a.norm_bias + int64_t(column) * 2)), shift);
      const float2 of_row = moments[of.row];
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = fmaf((values[e] - of_row.x) * of_row.y, weight[e], shift[e]);
      raw = pack<T>(values);
    }
    store_shared(of.place(of.now), raw);
  }
}

}  // namespace fuseline
