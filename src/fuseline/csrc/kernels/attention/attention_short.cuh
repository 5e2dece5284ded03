// Attention over short sequences: what the forward and the backward share.
//
// A block takes one (batch, head) problem after another, of up to kS queries and kS keys, each whole in shared memory. It
// has a warp for every 16 queries. Elements outside of the problem are zeros there, and hidden from the softmax. Of packed
// calls (kPacked, with no mask) a problem is a head of a sequence, and asks for where that starts whenever it is wanted.
#pragma once

#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/philox.cuh"
#include "device/ring.cuh"
#include "plans/attention_short.h"

namespace fuseline::short_attention {

// [batch, heads, rows, head_dim], strides in elements; no pointer where it is not wanted.
struct ShortTensor {
  void* at;
  int64_t batch, head, row;
};

// Division by a number that the host knows, of numbers under 2^31.
struct Divisor {
  unsigned by, multiplier, shift;

  __device__ __forceinline__ unsigned divide(unsigned number) const {
    return (__umulhi(number, multiplier) + number) >> shift;
  }
};

inline Divisor divisor_of(unsigned by) {
  unsigned shift = 0;
  while ((uint64_t(1) << shift) < by) ++shift;
  return {by, unsigned(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - by)) / by + 1), shift};
}

struct Counter;  // attention_short_turns.cuh

struct ShortAttention {
  ShortTensor q, k, v, out, grad_out, grad_q, grad_k, grad_v;
  float* lse;
  const float* grad_lse;
  const void* mask;
  int64_t mask_strides[3];  // of batch, head and row
  int mask_step;            // of key
  Dropout dropout;
  Counter* counter;  // null: each block has its share of the problems
  int problems;
  Divisor heads, group;  // group: query heads that share a head of keys
  int seqlen_q, seqlen_k, head_dim;
  const int32_t *starts_q, *starts_k;  // of packed sequences, or null; seqlen_q and seqlen_k are those of the longest
  int sequences, total_q, total_k;     // of these, and the rows and keys of all
  bool bottom_right;                   // the last row of a packed sequence sees all its keys
  int first, last;  // row t sees keys t + first .. t + last
  int mask_kind;
  bool bounded;  // first or last hide something
  float scale;   // of the products of q and k
};

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Rows of kColumns 16-bit elements in shared memory. The 16-byte chunks of a row change places by the row's number, so
// that eight rows of one chunk, or of one fragment, stand in different banks. A row starts at a multiple of its bytes:
// from the address of chunk c, that of chunk c ^ x is one exclusive or away, and eight rows further is one sum.
template <int kColumns>
struct Tile {
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kBytes = kColumns * 2;  // of a row
  static_assert((kChunks & (kChunks - 1)) == 0);

  uint32_t base;  // in shared memory

  __device__ __forceinline__ uint32_t chunk(int row, int chunk) const {
    constexpr int kRowsOfBanks = kChunks >= 8 ? 1 : 8 / kChunks;
    constexpr int kPlaces = kChunks >= 8 ? 8 : kChunks;
    return base + row * kBytes + ((chunk ^ (row / kRowsOfBanks % kPlaces)) * 16);
  }
  static __device__ __forceinline__ uint32_t chunks_on(uint32_t address, int chunks) { return address ^ (chunks * 16); }
  static __device__ __forceinline__ uint32_t rows_on(uint32_t address, int rows) { return address + rows * kBytes; }
};

// What load_matrices and load_matrices_transposed of mma.cuh do, from an address in shared memory.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&words)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}

// Starts the copy of 16 bytes into shared memory, of zeros if not `wanted`; kLine: the 256 around them come to the L2.
template <bool kLine = false>
__device__ __forceinline__ void copy_chunk(uint32_t to, const void* from, bool wanted) {
  if constexpr (kLine) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
  }
}

// The number of this thread, asked for anew by each step: addresses that follow from it would else be kept from one step
// to the next, in registers that the products want.
__device__ __forceinline__ unsigned thread_number() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The place of a warp and of its lane in the products.
struct Place {
  int lane, group, quad;
  int row;  // the first of the warp's 16 rows

  // Of the eight warps of a longest problem, those that share a scheduler (w and w + 4) have rows as far from the middle
  // on either side: under a diagonal they have as much to do together as any other two.
  template <int kS>
  __device__ __forceinline__ static Place here() {
    const unsigned thread = thread_number();
    unsigned rows = thread / kWarp;
    if (kS == 128) rows ^= rows / 4 * 3;
    return {int(thread % kWarp), int(thread % kWarp / 4), int(thread % 4), int(rows * 16)};
  }
};

template <int kS>
__device__ __forceinline__ void meet() {
  if constexpr (kS == 16) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

struct Head {
  unsigned batch, head;
};

__device__ __forceinline__ Head head_of(const ShortAttention& a, int problem) {
  const unsigned batch = a.heads.divide(problem);
  return {batch, problem - batch * a.heads.by};
}

// The head of keys of a problem.
__device__ __forceinline__ Head keys_of(const ShortAttention& a, int problem) {
  const Head head = head_of(a, problem);
  return {head.batch, a.group.divide(head.head)};
}

template <class T>
__device__ __forceinline__ T* rows_of(const ShortTensor& tensor, const Head& at) {
  return static_cast<T*>(tensor.at) + at.batch * tensor.batch + at.head * tensor.head;
}

__device__ __forceinline__ int load_word(uint32_t at) {
  int word;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}

__device__ __forceinline__ void store_pair(uint32_t at, int one, int two) {
  asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at), "r"(one), "r"(two) : "memory");
}

// Where a problem's rows and keys start, how many they are, and how far its diagonal is shifted.
struct Extent {
  int first_row, rows, first_key, keys, shift;
};

__device__ __forceinline__ int start_of(const int32_t* starts, unsigned sequence) {
  int start;  // asked for anew, not held
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(start) : "l"(starts + sequence));
  return start;
}

template <bool kPacked>
__device__ __forceinline__ Extent extent_of(const ShortAttention& a, int problem) {
  if constexpr (!kPacked) return {0, a.seqlen_q, 0, a.seqlen_k, 0};
  const unsigned sequence = a.heads.divide(problem);
  const int row = start_of(a.starts_q, sequence), key = start_of(a.starts_k, sequence);
  const int rows = min(start_of(a.starts_q, sequence + 1) - row, a.seqlen_q);
  const int keys = min(start_of(a.starts_k, sequence + 1) - key, a.seqlen_k);
  return {row, rows, key, keys, a.bottom_right ? keys - rows : 0};
}

// Of a problem's first row in lse.
template <bool kPacked>
__device__ __forceinline__ int64_t statistic_of(const ShortAttention& a, int problem, const Extent& extent) {
  if constexpr (!kPacked) return int64_t(problem) * a.seqlen_q;
  return int64_t(head_of(a, problem).head) * a.total_q + extent.first_row;
}

// Starts the copies of one problem's rows into a tile, from row `start` of the tensor on.
template <class T, int kS, bool kLine = false, class To>
__device__ __forceinline__ void fetch(const To& to, const ShortTensor& tensor, const Head& at, int start, int rows,
                                      int head_dim) {
  constexpr int kChunks = To::kChunks, kStep = 2 * kS / kChunks;
  const unsigned thread = thread_number();
  const int chunk = thread % kChunks, first = thread / kChunks;
  const bool inside = chunk * 8 < head_dim;
  const T* from = rows_of<const T>(tensor, at) + (start + first) * tensor.row + chunk * 8;
#pragma unroll
  for (int i = 0; i < kS / kStep; ++i) {
    const int row = first + i * kStep;
    copy_chunk<kLine>(to.chunk(row, chunk), from + i * kStep * tensor.row, inside && row < rows);
  }
}

template <int kTiles>
__device__ __forceinline__ void clear(float (&sums)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[i][e] = 0.f;
  }
}

// Word j of lane c and word c of lane j of a quad change places.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int quad) {
#pragma unroll
  for (int step = 1; step <= 2; ++step) {
    const bool upper = quad & step;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = step == 1 ? 2 * pair : pair, high = low + step;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? words[low] : words[high], step);
      words[low] = upper ? got : words[low];
      words[high] = upper ? words[high] : got;
    }
  }
}

// The warp's 16 rows of a product, times a factor a row, to memory: 16 bytes a lane, 64 of a row together.
template <class T, int kD>
__device__ __forceinline__ void store_rows(const float (&sums)[kD / 8][4], float factor, float factor8,
                                           const ShortTensor& tensor, const ShortAttention& a, int problem, int start,
                                           int rows, const Place& place) {
  T* const to = rows_of<T>(tensor, head_of(a, problem)) + start * tensor.row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row + place.group + 8 * half;
    const float by = half ? factor8 : factor;
    T* const start = to + row * tensor.row + 8 * place.quad;
#pragma unroll
    for (int i = 0; i < kD / 32; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float(&tile)[4] = sums[4 * i + j];
        words[j] = pack_pair<T>(tile[2 * half] * by, tile[2 * half + 1] * by);
      }
      transpose_quad(words, place.quad);
      if (row < rows && 32 * i + 8 * place.quad < a.head_dim) {
        *reinterpret_cast<uint4*>(start + 32 * i) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// Zeros for the rows behind the last packed sequence: those of `from` .. `to`, of every head.
template <class T>
__device__ __forceinline__ void clear_behind(const ShortAttention& a, const ShortTensor& tensor, int from, int to) {
  if (tensor.at == nullptr) return;
  const int vectors = a.head_dim / 8;
  const int64_t count = int64_t(to - from) * a.heads.by * vectors;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t line = i / vectors;
    T* const row = static_cast<T*>(tensor.at) + line % a.heads.by * tensor.head + (from + line / a.heads.by) * tensor.row;
    *reinterpret_cast<uint4*>(row + i % vectors * 8) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace fuseline::short_attention
