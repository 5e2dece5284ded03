// Rows as e4m3 or e5m2, each with its own scale: what a scaled matrix product takes. A row is there already, or it is made
// in the same pass, by an activation or its gradient, and then leaves in its own dtype as well. Each column may be
// multiplied by a number of its own on the way to fp8, as the gradient of a layer is by the scales of the weight's rows.
//
// Moves: what is read, once; the row, if it is made here, and a byte an element once. Limit: HBM bandwidth; for few rows
// the launch.
//
// Threads: whole warps share a row, and short rows stand beside each other in a block. A thread has every so-manieth
// vector of 8 elements, kHeld of them, which it keeps as 16-byte words from the first pass, which finds the largest, to
// the second, which scales. Columns' factors are read again for each, as vectors: they stay in the L1. A block has its
// rows and goes, since blocks that follow each other are neighbours in memory; only where columns are summed over rows
// do blocks stay, and fetch their next row while they have one.
//
// A chip starts about 800 blocks in a us: 65,536 rows of 768 as blocks of their own take 82 us, where their bytes
// take 36.
#pragma once

#include "device/elementwise.cuh"
#include "device/fp8.cuh"
#include "fuseline_fp8.h"

namespace fuseline {

struct Fp8Rows {
  const void* in[3];
  int64_t stride[3];     // elements between rows
  const float* bias;     // [n] for the source; null: none
  const float* columns;  // null: none
  void* wide;            // rows of the source's results; null if it has none
  uint8_t* narrow;
  float* scales;
  float* sums;           // [blocks, n]; null if none are wanted
  int rows;
  int vectors;           // of a row of the source
  bool e5m2;
};

// What a row in fp8 is made of: kIn vectors of 8 elements give kOut of them, which stand n elements apart in a row of
// kOut * n. kHeld: the vectors of a thread. kMade: results leave in T as well, and are rounded to it first. kSummed: they
// are also added up over rows. kBlocks: of kMostThreads, on a multiprocessor.
struct AsTheyAre {
  static constexpr int kIn = 1, kOut = 1, kHeld = 4, kBlocks = 2;
  static constexpr bool kMade = false, kSummed = false;
};

// 8 elements as they are in memory.
template <class T>
struct Raw8 {
  static constexpr int kSize = kVector<T>, kLoads = kFp8Vector / kSize;
  using Part = float (&)[kSize];
  using ConstPart = const float (&)[kSize];
  uint4 words[kLoads];

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = load_once(from + i * kSize);
  }
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) reinterpret_cast<uint4*>(to)[i] = words[i];
  }
  __device__ __forceinline__ void unpacked(float (&values)[kFp8Vector]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) unpack<T>(words[i], reinterpret_cast<Part>(values[i * kSize]));
  }
  __device__ __forceinline__ void rounded(const float (&values)[kFp8Vector]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = pack<T>(reinterpret_cast<ConstPart>(values[i * kSize]));
  }
};

// As numbers, times their columns' factors.
template <class T>
__device__ __forceinline__ void weighted(const Raw8<T>& raw, const float* columns, int at, float (&values)[kFp8Vector]) {
  raw.unpacked(values);
  if (!columns) return;
  float factors[kFp8Vector];
  load_reused<float>(columns + at, factors);
#pragma unroll
  for (int i = 0; i < kFp8Vector; ++i) values[i] *= factors[i];
}

// ---- the kernel ----

template <class Source, class T>
__global__ void __launch_bounds__(kMostThreads, Source::kBlocks) fp8_rows(const Fp8Rows a) {
  constexpr int kIn = Source::kIn, kOut = Source::kOut, kHeld = Source::kHeld;
  const int threads = blockDim.x, n = a.vectors * kFp8Vector;
  const int step = int(gridDim.x * blockDim.y);
  let_next_start();
  wait_for_earlier();

  Raw8<T> raw[kHeld][kIn];
  float sums[Source::kSummed ? kHeld : 1][kFp8Vector] = {};
  const auto fetch = [&](int row) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = int(threadIdx.x) + i * threads;
      if (row >= a.rows || at >= a.vectors) continue;
#pragma unroll
      for (int s = 0; s < kIn; ++s) {
        raw[i][s].load(static_cast<const T*>(a.in[s]) + row * a.stride[s] + at * kFp8Vector);
      }
    }
  };
  int first = int(blockIdx.x * blockDim.y);
  fetch(first + int(threadIdx.y));
  // All rows of a block take the same turns, since they meet.
  for (int turn = 0; first < a.rows; first += step, turn ^= 1) {
    const int row = first + int(threadIdx.y);
    const bool mine = row < a.rows;
    Raw8<T> held[kHeld][kOut];
    float most = 0.f;
    int column = int(threadIdx.x) * kFp8Vector;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = column + i * threads * kFp8Vector;
      if (!mine || at >= n) continue;
      if constexpr (Source::kMade) {
        float in[kIn][kFp8Vector], bias[kFp8Vector] = {}, out[kOut][kFp8Vector];
#pragma unroll
        for (int s = 0; s < kIn; ++s) raw[i][s].unpacked(in[s]);
        if (a.bias) load_reused<float>(a.bias + at, bias);
        apply_each<Source>(in, bias, out);
#pragma unroll
        for (int o = 0; o < kOut; ++o) {
          held[i][o].rounded(out[o]);
          held[i][o].store(static_cast<T*>(a.wide) + (int64_t(row) * kOut + o) * n + at);
        }
      } else {
        held[i][0] = raw[i][0];
      }
#pragma unroll
      for (int o = 0; o < kOut; ++o) {
        float values[kFp8Vector];
        if constexpr (Source::kSummed) {
          held[i][o].unpacked(values);
#pragma unroll
          for (int j = 0; j < kFp8Vector; ++j) sums[i][j] += values[j];
        }
        weighted(held[i][o], a.columns, o * n + at, values);
#pragma unroll
        for (int j = 0; j < kFp8Vector; ++j) most = larger(most, values[j]);
      }
    }
    if constexpr (Source::kSummed) fetch(row + step);
    const auto of_rest = [&](auto&& each) {  // what is behind those held is read from the L2 again
      if constexpr (!Source::kMade) {
        for (int at = column + kHeld * threads * kFp8Vector; mine && at < n; at += threads * kFp8Vector) {
          Raw8<T> one;
          float values[kFp8Vector];
          one.load(static_cast<const T*>(a.in[0]) + row * a.stride[0] + at);
          weighted(one, a.columns, at, values);
          each(at, values);
        }
      }
    };
    of_rest([&](int, const float(&values)[kFp8Vector]) {
#pragma unroll
      for (int j = 0; j < kFp8Vector; ++j) most = larger(most, values[j]);
    });

    const float scale = fp8_scale(largest_of_row(most, turn), a.e5m2);
    const float inverse = __frcp_rn(scale);
    if (mine && threadIdx.x == 0) a.scales[row] = scale;
    forget(column);  // or the factors would be kept
    uint8_t* const narrow = a.narrow + int64_t(row) * kOut * n;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = column + i * threads * kFp8Vector;
      if (!mine || at >= n) continue;
#pragma unroll
      for (int o = 0; o < kOut; ++o) {
        float values[kFp8Vector];
        weighted(held[i][o], a.columns, o * n + at, values);
        store_fp8(narrow + o * n + at, values, inverse, a.e5m2);
      }
    }
    of_rest([&](int at, const float(&values)[kFp8Vector]) { store_fp8(narrow + at, values, inverse, a.e5m2); });
    if constexpr (!Source::kSummed) return;
  }
  if constexpr (Source::kSummed) {
    if (!a.sums) return;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = (int(threadIdx.x) + i * threads) * kFp8Vector;
      if (at >= n) continue;
      float4* const to = reinterpret_cast<float4*>(a.sums + (int64_t(blockIdx.x) * blockDim.y + threadIdx.y) * n + at);
      to[0] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
      to[1] = make_float4(sums[i][4], sums[i][5], sums[i][6], sums[i][7]);
    }
  }
}

// ---- its launch ----

constexpr int kRowThreads = 256;  // of a block whose rows stand beside each other

// How rows of so many vectors lie in blocks. Few rows get more threads each.
template <class Source>
dim3 fp8_block(int64_t rows, int64_t vectors, const Device& device) {
  const int held = rows > device.processors ? Source::kHeld : 1;
  const int64_t warps = std::clamp<int64_t>(divide_up(vectors, held * kWarp), 1, kMostThreads / kWarp);
  const int threads = int(warps) * kWarp;
  const int64_t beside = std::min<int64_t>(kRowThreads / threads, rows / device.processors);
  return dim3(unsigned(threads), unsigned(std::max<int64_t>(1, beside)));
}

// Rows whose columns are summed: as many as are at work at a time, each with a row of sums.
template <class Source>
int64_t fp8_rows_at_once(int64_t rows, int64_t vectors, const Device& device) {
  const dim3 block = fp8_block<Source>(rows, vectors, device);
  const int64_t blocks = std::max<int64_t>(1, Source::kBlocks * kMostThreads / int64_t(block.x * block.y));
  return std::min(divide_up(rows, block.y), blocks * device.processors) * block.y;
}

template <class Source, class T>
int launch_fp8_rows(const Fp8Rows& a, const Device& device, void* stream) {
  const dim3 block = fp8_block<Source>(a.rows, a.vectors, device);
  const int64_t at_once = Source::kSummed ? fp8_rows_at_once<Source>(a.rows, a.vectors, device) : a.rows;
  return launch(fp8_rows<Source, T>, a, divide_up(at_once, block.y), block, 0, 1, stream, device.clusters);
}

}  // namespace fuseline
