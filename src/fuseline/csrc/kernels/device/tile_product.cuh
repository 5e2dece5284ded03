// Products of tiles by the 256 threads of a block, in one of three arithmetics, and the ring of shared memory that feeds
// them. Sums lie in registers as the tensor cores leave them (mma.cuh, D), whatever made them: what follows a product
// need not know.
//
// An operand is [row][k] (Order::rows) or [k][row] (Order::across) in memory, and lies in shared memory as it does there.
#pragma once

#include "group.cuh"
#include "mma.cuh"
#include "ring.cuh"
#include "vector.cuh"

namespace fuseline {

// Arithmetics: elements of 16 bits or fp32 rounded to TF32 in tensor cores, and fp32 in FFMA. kUnit elements of k at a time.
template <class T>
struct Sixteen {
  using Element = T;
  static constexpr int kUnit = 16;
};
struct Tf32 {
  using Element = float;
  static constexpr int kUnit = 8;
};
struct Exact {
  using Element = float;
  static constexpr int kUnit = 8;
};

template <class Math>
constexpr bool kSixteen = sizeof(typename Math::Element) == 2;

enum class Order { rows, across };

constexpr int kTileThreads = 256;
constexpr int kStepBytes = 128;  // of k that a stage holds: a step costs a barrier and two latencies, however short it is

// Elements from line to line in shared memory, of lines of a multiple of 32 bytes: such that what eight lines have at the same
// place lies in different banks. fp32 lines that are only read [k][row] want 32 bytes more.
template <class E>
__host__ __device__ constexpr int padded(int elements) {
  return elements + 16 / int(sizeof(E));
}

__device__ __forceinline__ void load_two_matrices(uint32_t (&words)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

__device__ __forceinline__ void load_two_matrices_transposed(uint32_t (&words)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

// Waits until all but the last kGroups committed groups of this thread have arrived.
template <int kGroups>
__device__ __forceinline__ void wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

template <Order kOrder>
__device__ __forceinline__ float element(const float* at, int pitch, int row, int k) {
  return kOrder == Order::rows ? at[row * pitch + k] : at[k * pitch + row];
}

// Elements k .. k + 7 of a row; k is a multiple of 8.
template <Order kOrder>
__device__ __forceinline__ void eight(const float* at, int pitch, int row, int k, float (&values)[8]) {
#pragma unroll
  for (int t = 0; t < 8; t += 4) {
    if constexpr (kOrder == Order::rows) {
      const float4 four = *reinterpret_cast<const float4*>(at + row * pitch + k + t);
      values[t] = four.x, values[t + 1] = four.y, values[t + 2] = four.z, values[t + 3] = four.w;
    } else {
#pragma unroll
      for (int u = t; u < t + 4; ++u) values[u] = at[(k + u) * pitch + row];
    }
  }
}

// sums[i][j] += A (16 rows from 16 i) * B (8 rows from 8 j) over `units` of k; a and b point at the warp's first rows.
template <class Math, Order kA, Order kB, int kTall, int kWide>
__device__ __forceinline__ void multiply(float (&sums)[kTall][kWide][4], const typename Math::Element* a, int a_pitch,
                                         const typename Math::Element* b, int b_pitch, int units) {
  const int lane = threadIdx.x % kWarp;
  if constexpr (kSixteen<Math>) {
    using T = typename Math::Element;
    const int low = lane % 8, middle = lane / 8 % 2 * 8, high = lane / 16 * 8;
#pragma unroll 4
    for (int u = 0; u < units; ++u, a += kA == Order::rows ? 16 : 16 * a_pitch, b += kB == Order::rows ? 16 : 16 * b_pitch) {
      uint32_t left[kTall][4];
#pragma unroll
      for (int i = 0; i < kTall; ++i) {
        if constexpr (kA == Order::rows) {
          load_matrices(left[i], a + (16 * i + low + middle) * a_pitch + high);
        } else {
          load_matrices_transposed(left[i], a + (low + high) * a_pitch + 16 * i + middle);
        }
      }
#pragma unroll
      for (int j = 0; j < kWide; j += 2) {
        uint32_t right[4];
        if (j + 1 < kWide) {
          if constexpr (kB == Order::rows) {
            load_matrices(right, b + (8 * j + low + high) * b_pitch + middle);
          } else {
            load_matrices_transposed(right, b + (low + middle) * b_pitch + 8 * j + high);
          }
        } else if constexpr (kB == Order::rows) {
          load_two_matrices(right, b + (8 * j + low) * b_pitch + middle);
        } else {
          load_two_matrices_transposed(right, b + (low + middle) * b_pitch + 8 * j);
        }
#pragma unroll
        for (int i = 0; i < kTall; ++i) {
          mma_16816<T>(sums[i][j], left[i], right[0], right[1]);
          if (j + 1 < kWide) mma_16816<T>(sums[i][j + 1 < kWide ? j + 1 : j], left[i], right[2], right[3]);
        }
      }
    }
  } else if constexpr (std::is_same_v<Math, Tf32>) {
    const int group = lane / 4, quad = lane % 4;
#pragma unroll 2
    for (int u = 0; u < units; ++u) {
      const int k = 8 * u + quad;
      uint32_t left[kTall][4];
#pragma unroll
      for (int i = 0; i < kTall; ++i) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          left[i][w] = to_tf32(element<kA>(a, a_pitch, 16 * i + group + w % 2 * 8, k + w / 2 * 4));
        }
      }
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        const uint32_t first = to_tf32(element<kB>(b, b_pitch, 8 * j + group, k));
        const uint32_t second = to_tf32(element<kB>(b, b_pitch, 8 * j + group, k + 4));
#pragma unroll
        for (int i = 0; i < kTall; ++i) mma_1688_tf32(sums[i][j], left[i], first, second);
      }
    }
  } else {
    // Eight products are added up before they meet the sum: its rounding errors are fewer.
    const int group = lane / 4, quad = lane % 4;
#pragma unroll 1
    for (int k = 0; k < 8 * units; k += 8) {
      float left[kTall][2][8];
#pragma unroll
      for (int i = 0; i < kTall; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) eight<kA>(a, a_pitch, 16 * i + group + 8 * half, k, left[i][half]);
      }
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        float right[2][8];
        if constexpr (kB == Order::rows) {
#pragma unroll
          for (int half = 0; half < 2; ++half) eight<kB>(b, b_pitch, 8 * j + 2 * quad + half, k, right[half]);
        } else {
#pragma unroll
          for (int t = 0; t < 8; ++t) {
            const float2 two = *reinterpret_cast<const float2*>(b + (k + t) * b_pitch + 8 * j + 2 * quad);
            right[0][t] = two.x, right[1][t] = two.y;
          }
        }
#pragma unroll
        for (int i = 0; i < kTall; ++i) {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            float sum = left[i][w / 2][0] * right[w % 2][0];
#pragma unroll
            for (int t = 1; t < 8; ++t) sum = fmaf(left[i][w / 2][t], right[w % 2][t], sum);
            sums[i][j][w] += sum;
          }
        }
      }
    }
  }
}

// sums[j] += P * B (8 rows from 8 j), B [k][row]: P are the sums of a product before, 16 rows and `tiles` times 8 of k.
template <class Math, int kTiles, int kWide>
__device__ __forceinline__ void multiply_held(float (&sums)[kWide][4], const float (&p)[kTiles][4],
                                              const typename Math::Element* b, int pitch, int tiles) {
  const int lane = threadIdx.x % kWarp, group = lane / 4, quad = lane % 4;
  if constexpr (kSixteen<Math>) {
    using T = typename Math::Element;
    const int low = lane % 8, middle = lane / 8 % 2 * 8, high = lane / 16 * 8;
#pragma unroll
    for (int t = 0; t < kTiles; t += 2) {
      if (t >= tiles) break;
      const uint32_t left[4] = {pack_pair<T>(p[t][0], p[t][1]), pack_pair<T>(p[t][2], p[t][3]),
                                pack_pair<T>(p[t + 1][0], p[t + 1][1]), pack_pair<T>(p[t + 1][2], p[t + 1][3])};
#pragma unroll
      for (int j = 0; j < kWide; j += 2) {
        uint32_t right[4];
        load_matrices_transposed(right, b + (8 * t + low + middle) * pitch + 8 * j + high);
        mma_16816<T>(sums[j], left, right[0], right[1]);
        mma_16816<T>(sums[j + 1], left, right[2], right[3]);
      }
    }
  } else if constexpr (std::is_same_v<Math, Tf32>) {
    // The order of k is free, if it is the same in P and B: k = quad of the product is taken to be 2 quad, and quad + 4 to
    // be 2 quad + 1, which is what the thread holds.
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t >= tiles) break;
      const uint32_t left[4] = {to_tf32(p[t][0]), to_tf32(p[t][2]), to_tf32(p[t][1]), to_tf32(p[t][3])};
      const float* const from = b + (8 * t + 2 * quad) * pitch + group;
#pragma unroll
      for (int j = 0; j < kWide; ++j) mma_1688_tf32(sums[j], left, to_tf32(from[8 * j]), to_tf32(from[pitch + 8 * j]));
    }
  } else {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t >= tiles) break;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float upper = __shfl_sync(kAllLanes, p[t][k % 2], (lane & ~3) | k / 2);
        const float lower = __shfl_sync(kAllLanes, p[t][2 + k % 2], (lane & ~3) | k / 2);
        const float* const from = b + (8 * t + k) * pitch + 2 * quad;
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
          const float2 two = *reinterpret_cast<const float2*>(from + 8 * j);
          sums[j][0] = fmaf(upper, two.x, sums[j][0]), sums[j][1] = fmaf(upper, two.y, sums[j][1]);
          sums[j][2] = fmaf(lower, two.x, sums[j][2]), sums[j][3] = fmaf(lower, two.y, sums[j][3]);
        }
      }
    }
  }
}

// One operand of a block's product on its way through the ring: kRows rows of it, `step` elements of k a stage. The copies
// of a thread are the same in every stage, a step further; what lies outside is zero.
template <class E, Order kOrder, int kRows>
struct Feed {
  static constexpr int kStep = kStepBytes / int(sizeof(E));
  static constexpr int kSize = 16 / int(sizeof(E));
  static constexpr int kPitch = kOrder == Order::rows ? padded<E>(kStep) : kRows + 8;
  static constexpr int kElements = (kOrder == Order::rows ? kRows : kStep) * kPitch;
  static constexpr int kPieces = kOrder == Order::rows ? kStep / kSize : kRows / kSize;  // of 16 bytes a line
  static constexpr int kLines = kOrder == Order::rows ? kRows : kStep;
  static constexpr int kCopies = (kLines * kPieces + kTileThreads - 1) / kTileThreads;

  const E* from[kCopies];  // of the next stage
  const E* anything;       // what a copy that only writes zeros may name
  uint32_t there;          // bit c: copy c has a source
  int64_t advance;         // elements from stage to stage

  // `row(r)` points at k = 0 of row r, or is null; the order is rows.
  template <class Row>
  __device__ __forceinline__ void begin_rows(const E* any, const Row& row) {
    static_assert(kOrder == Order::rows);
    anything = any, there = 0, advance = kStep;
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
      const int copy = threadIdx.x + c * kTileThreads;
      const E* const at = copy < kLines * kPieces ? row(copy / kPieces) : nullptr;
      from[c] = at + copy % kPieces * kSize;
      there |= uint32_t(at != nullptr) << c;
    }
  }

  // Rows first .. of `rows` lie side by side from `at`, elements of k `pitch` apart; the order is across.
  __device__ __forceinline__ void begin_across(const E* at, int64_t pitch, int first, int rows) {
    static_assert(kOrder == Order::across);
    anything = at, there = 0, advance = kStep * pitch;
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
      const int copy = threadIdx.x + c * kTileThreads;
      const int row = first + copy % kPieces * kSize;
      from[c] = at + copy / kPieces * pitch + row;
      there |= uint32_t(copy < kLines * kPieces && row < rows) << c;
    }
  }

  // Queues the stage that begins at k, of `length`.
  __device__ __forceinline__ void copy(E* stage, int k, int length) {
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
      const int copy = threadIdx.x + c * kTileThreads;
      if (kLines * kPieces % kTileThreads != 0 && copy >= kLines * kPieces) break;
      const int line = copy / kPieces, piece = copy % kPieces * kSize;
      const bool wanted = (there >> c & 1) && k + (kOrder == Order::rows ? piece : line) < length;
      copy_async<16>(stage + line * kPitch + piece, wanted ? from[c] : anything, wanted);
      from[c] += advance;
    }
  }
};

// sums += A (kRowsA rows) * B (kRowsB rows) over `length` of k, both coming through the ring. A warp has 16 * kTall rows
// of A and 8 * kWide of B.
template <class Math, Order kA, Order kB, int kRowsA, int kRowsB, int kTall, int kWide, int kStages>
struct TileProduct {
  using E = typename Math::Element;
  using FeedA = Feed<E, kA, kRowsA>;
  using FeedB = Feed<E, kB, kRowsB>;
  static constexpr int kWarpsDown = kRowsA / (16 * kTall), kWarpsAcross = kRowsB / (8 * kWide);
  static_assert(kWarpsDown * kWarpsAcross == kTileThreads / kWarp);
  static constexpr int kStage = FeedA::kElements + FeedB::kElements;
  static constexpr int kBytes = kStages * kStage * int(sizeof(E));

  static __device__ __forceinline__ int row() { return int(threadIdx.x) / kWarp / kWarpsAcross * 16 * kTall; }
  static __device__ __forceinline__ int column() { return int(threadIdx.x) / kWarp % kWarpsAcross * 8 * kWide; }

  // Queues the first stages. The ring may hold anything, but nobody may be reading it.
  static __device__ __forceinline__ void begin(FeedA& a, FeedB& b, E* ring, int length) {
    constexpr int kStep = FeedA::kStep;
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) {
      if (s * kStep < length) {
        a.copy(ring + s * kStage, s * kStep, length);
        b.copy(ring + s * kStage + FeedA::kElements, s * kStep, length);
      }
      commit_copies();
    }
  }

  // The product, begun before. Nobody reads the ring any more when this returns.
  static __device__ __forceinline__ void finish(float (&sums)[kTall][kWide][4], FeedA& a, FeedB& b, E* ring, int length) {
    constexpr int kStep = FeedA::kStep;
    const int steps = (length + kStep - 1) / kStep;
    int stage = 0, next = kStages - 1;
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
      wait_but<kStages - 2>();
      __syncthreads();
      if (s + kStages - 1 < steps) {
        a.copy(ring + next * kStage, (s + kStages - 1) * kStep, length);
        b.copy(ring + next * kStage + FeedA::kElements, (s + kStages - 1) * kStep, length);
      }
      commit_copies();
      const E* const from_a = ring + stage * kStage;
      const E* const from_b = from_a + FeedA::kElements;
      multiply<Math, kA, kB>(sums, kA == Order::rows ? from_a + row() * FeedA::kPitch : from_a + row(), FeedA::kPitch,
                             kB == Order::rows ? from_b + column() * FeedB::kPitch : from_b + column(), FeedB::kPitch,
                             kStep / Math::kUnit);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      next = next + 1 == kStages ? 0 : next + 1;
    }
    wait_for_all();
    __syncthreads();
  }

  static __device__ __forceinline__ void run(float (&sums)[kTall][kWide][4], FeedA& a, FeedB& b, E* ring, int length) {
    begin(a, b, ring, length);
    finish(sums, a, b, ring, length);
  }
};

// Calls put(row, column, left, right) for each pair of sums of a warp whose first row and column are given.
template <int kTall, int kWide, class Put>
__device__ __forceinline__ void each_pair(const float (&sums)[kTall][kWide][4], int row, int column, const Put& put) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kTall; ++i) {
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        put(row + 16 * i + lane / 4 + 8 * half, column + 8 * j + lane % 4 * 2, sums[i][j][2 * half], sums[i][j][2 * half + 1]);
      }
    }
  }
}

// Two neighbours of a row, the first at an even place.
template <class E>
__device__ __forceinline__ void store_pair(E* at, float left, float right) {
  if constexpr (sizeof(E) == 4) {
    *reinterpret_cast<float2*>(at) = make_float2(left, right);
  } else {
    *reinterpret_cast<uint32_t*>(at) = pack_pair<E>(left, right);
  }
}

}  // namespace fuseline
