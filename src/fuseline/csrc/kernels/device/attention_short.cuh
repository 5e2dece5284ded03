// Attention over short sequences: what the forward and the backward share.
//
// A block takes one (batch, head) problem after another, of up to kS queries and kS keys, each whole in shared memory. It
// has a warp for every 16 queries. Elements outside of the problem are zeros there, and hidden from the softmax.
#pragma once

#include "../fuseline_attention.h"
#include "activation.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "philox.cuh"
#include "ring.cuh"

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

struct ShortAttention {
  ShortTensor q, k, v, out, grad_out, grad_q, grad_k, grad_v;
  float* lse;
  const float* grad_lse;
  const void* mask;
  int64_t mask_strides[3];  // of batch, head and row
  int mask_step;            // of key
  Dropout dropout;
  int problems;
  Divisor heads, group;  // group: query heads that share a head of keys
  int seqlen_q, seqlen_k, head_dim;
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

// Starts the copy of 16 bytes into shared memory, of zeros if not `wanted`.
__device__ __forceinline__ void copy_chunk(uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
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

  __device__ __forceinline__ static Place here() {
    const unsigned thread = thread_number();
    return {int(thread % kWarp), int(thread % kWarp / 4), int(thread % 4), int(thread / kWarp * 16)};
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

template <class T>
__device__ __forceinline__ T* rows_of(const ShortTensor& tensor, const Head& at) {
  return static_cast<T*>(tensor.at) + at.batch * tensor.batch + at.head * tensor.head;
}

// Starts the copies of one problem's rows into a tile.
template <class T, int kS, int kD>
__device__ __forceinline__ void fetch(const Tile<kD>& to, const ShortTensor& tensor, const Head& at, int rows,
                                      int head_dim) {
  constexpr int kChunks = Tile<kD>::kChunks, kStep = 2 * kS / kChunks;
  const unsigned thread = thread_number();
  const int chunk = thread % kChunks, first = thread / kChunks;
  const bool inside = chunk * 8 < head_dim;
  const T* from = rows_of<const T>(tensor, at) + first * tensor.row + chunk * 8;
#pragma unroll
  for (int i = 0; i < kS / kStep; ++i) {
    const int row = first + i * kStep;
    copy_chunk(to.chunk(row, chunk), from + i * kStep * tensor.row, inside && row < rows);
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

// Steps of a product that are taken at a time; one where registers are short.
template <int kS, int kD>
constexpr int kSteps = kS == 128 && kD < 128 ? 1 : 2;

// sums[16, kN] = left[row .. + 16, kD] * right[kN, kD]^T.
template <class T, int kD, int kN>
__device__ __forceinline__ void multiply_rows(float (&sums)[kN / 8][4], const Tile<kD>& left, const Tile<kD>& right,
                                              const Place& place) {
  const uint32_t left_at = left.chunk(place.row + place.lane % 16, place.lane / 16);
  const uint32_t right_at = right.chunk(place.lane % 8 + place.lane / 16 * 8, place.lane / 8 % 2);
  clear(sums);
#pragma unroll (kSteps<kN, kD>)
  for (int k = 0; k < kD / 16; ++k) {
    uint32_t a[4];
    load_matrices(a, left.chunks_on(left_at, 2 * k));
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, right.rows_on(right.chunks_on(right_at, 2 * k), 16 * n));
      mma_16816<T>(sums[2 * n], a, b[0], b[1]);
      mma_16816<T>(sums[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// sums[16, kD] += a[16, 16] * right[16 * k .. + 16, kD].
template <class T, int kD>
__device__ __forceinline__ void multiply_block(float (&sums)[kD / 8][4], const uint32_t (&a)[4], const Tile<kD>& right,
                                               int k, const Place& place) {
  const uint32_t right_at = right.rows_on(right.chunk(place.lane % 16, place.lane / 16), 16 * k);
#pragma unroll
  for (int n = 0; n < kD / 16; ++n) {
    uint32_t b[4];
    load_matrices_transposed(b, right.chunks_on(right_at, 2 * n));
    mma_16816<T>(sums[2 * n], a, b[0], b[1]);
    mma_16816<T>(sums[2 * n + 1], a, b[2], b[3]);
  }
}

// sums[16, kD] = held[16, kS] * right[kS, kD].
template <class T, int kS, int kD>
__device__ __forceinline__ void multiply_held(float (&sums)[kD / 8][4], const uint32_t (&held)[kS / 16][4],
                                              const Tile<kD>& right, const Place& place) {
  clear(sums);
#pragma unroll
  for (int k = 0; k < kS / 16; ++k) multiply_block<T, kD>(sums, held[k], right, k, place);
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// Bits of the pairs of a row that a lane holds: bit 2 i + e is element e of pair i.
__device__ __forceinline__ bool has_bit(uint32_t bits, int pair, int element) { return bits >> (2 * pair + element) & 1; }

// What a mask stands at for the two rows of a lane; rows and keys outside of the problem read the last.
struct MaskPlace {
  int64_t row, to8;  // the first element of row `group`, and how far behind it row `group` + 8 starts
};

__device__ __forceinline__ MaskPlace mask_place(const ShortAttention& a, int problem, const Place& place) {
  const Head head = head_of(a, problem);
  const int row = min(place.row + place.group, a.seqlen_q - 1), row8 = min(place.row + place.group + 8, a.seqlen_q - 1);
  return {head.batch * a.mask_strides[0] + head.head * a.mask_strides[1] + row * a.mask_strides[2],
          (row8 - row) * a.mask_strides[2]};
}

// Takes off the keys that a boolean mask does not keep.
template <int kS>
__device__ __forceinline__ void kept_by_mask(uint32_t (&kept)[2], const ShortAttention& a, const MaskPlace& at,
                                             const Place& place) {
  const unsigned char* const mask = static_cast<const unsigned char*>(a.mask) + at.row;
#pragma unroll 2
  for (int i = 0; i < kS / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const unsigned char* const one = mask + min(8 * i + 2 * place.quad + e, a.seqlen_k - 1) * a.mask_step;
      const uint32_t hidden = uint32_t(*one == 0);
      const uint32_t hidden8 = at.to8 == 0 ? hidden : uint32_t(one[at.to8] == 0);
      kept[0] &= ~(hidden << (2 * i + e));
      kept[1] &= ~(hidden8 << (2 * i + e));
    }
  }
}

// Adds a mask of type M to the scores, which become powers of two. Finite values stay finite: a row of nothing but the
// lowest number is uniform.
template <class M, int kS>
__device__ __forceinline__ void add_mask(float (&scores)[kS / 8][4], const ShortAttention& a, const MaskPlace& at,
                                         float factor, const Place& place) {
  const M* const mask = static_cast<const M*>(a.mask) + at.row;
  const M* const mask8 = mask + at.to8;
#pragma unroll
  for (int i = 0; i < kS / 8; ++i) {
    if (i % 4 == 0) meet<kS>();  // not more loads at once than there are registers for
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = min(8 * i + 2 * place.quad + e % 2, a.seqlen_k - 1) * a.mask_step;
      const float value = to_float((e < 2 ? mask : mask8)[key]);
      const float added = value < -1e30f && value > -kInfinity ? -1e30f : value * kLog2E;
      scores[i][e] = fmaf(scores[i][e], factor, added);
    }
  }
}

// The keys 0 .. last as bits of the pairs that a lane holds.
template <int kS>
__device__ __forceinline__ uint32_t keys_to(int last, int quad) {
  uint32_t bits = 0;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int behind = last - 2 * quad - e;  // the first key of the lane's first pair, and of the next ones 8 further
    const int pairs = behind < 0 ? 0 : min(behind / 8 + 1, kS / 8);
    bits |= (pairs == 16 ? ~0u : (1u << (2 * pairs)) - 1) & (0x55555555u << e);
  }
  return bits;
}

// The keys that a row sees by its place.
template <int kS>
__device__ __forceinline__ void seen_keys(uint32_t (&kept)[2], const ShortAttention& a, const Place& place) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row + place.group + 8 * half;
    kept[half] = keys_to<kS>(min(row + a.last, a.seqlen_k - 1), place.quad) & ~keys_to<kS>(row + a.first - 1, place.quad);
  }
}

// Applies the mask and hides keys; answers what the scores are still to be multiplied with to be powers of two.
template <class T, int kS>
__device__ __forceinline__ float apply_mask(float (&scores)[kS / 8][4], const ShortAttention& a, int problem,
                                            const Place& place) {
  float factor = a.scale * kLog2E;
  const bool by_place = a.bounded || a.seqlen_k < kS;
  if (a.mask_kind > FUSELINE_MASK_BOOL) {
    const MaskPlace at = mask_place(a, problem, place);
    if (a.mask_kind == FUSELINE_MASK_ADD) {
      add_mask<T, kS>(scores, a, at, factor, place);
    } else {
      add_mask<float, kS>(scores, a, at, factor, place);
    }
    factor = 1.f;
  }
  if (by_place || a.mask_kind == FUSELINE_MASK_BOOL) {
    uint32_t kept[2] = {~0u, ~0u};
    if (by_place) seen_keys<kS>(kept, a, place);
    if (a.mask_kind == FUSELINE_MASK_BOOL) kept_by_mask<kS>(kept, a, mask_place(a, problem, place), place);
#pragma unroll
    for (int i = 0; i < kS / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!has_bit(kept[e / 2], i, e % 2)) scores[i][e] = -kInfinity;
      }
    }
  }
  return factor;
}

// Of the rows `group` and `group` + 8: the sum of e^(score - max), and log2 of that with the largest score put back.
struct RowSums {
  float sum[2], log2_sum[2];
};

// Scores become e^(score - largest of the row); a row that sees nothing is zeros.
template <class T, int kS>
__device__ __forceinline__ RowSums exponentials(float (&scores)[kS / 8][4], const ShortAttention& a, int problem,
                                                const Place& place) {
  const float factor = apply_mask<T, kS>(scores, a, problem, place);
  RowSums sums;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = -kInfinity;
#pragma unroll
    for (int i = 0; i < kS / 8; ++i) most = fmaxf(most, fmaxf(scores[i][2 * half], scores[i][2 * half + 1]));
    most = quad_max(most);
    const float shift = most == -kInfinity ? 0.f : most * factor;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kS / 8; ++i) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        scores[i][e] = fast_exp2(fmaf(scores[i][e], factor, -shift));
        sum += scores[i][e];
      }
    }
    sums.sum[half] = quad_sum(sum);
    sums.log2_sum[half] = shift + __log2f(sums.sum[half]);
  }
  return sums;
}

// What dropout keeps of elements first .. + 4, of one block of words, as bits.
__device__ __forceinline__ uint32_t kept_of_four(const Dropout& dropout, uint64_t seed, int64_t first) {
  const uint4 words = philox_uniform(seed, uint64_t(first) / 4);
  return uint32_t(words.x >= dropout.threshold) | uint32_t(words.y >= dropout.threshold) << 1 |
         uint32_t(words.z >= dropout.threshold) << 2 | uint32_t(words.w >= dropout.threshold) << 3;
}

// The elements that dropout keeps, for each of the two rows. Where rows start at multiples of four elements, two lanes
// share each block of words: the even lane draws those of the even tiles, the odd lane the others, and they exchange.
template <int kS>
__device__ __forceinline__ void kept_by_dropout(uint32_t (&kept)[2], const ShortAttention& a, int problem,
                                                const Place& place) {
  const uint64_t seed = uint64_t(*a.dropout.seed);
  const bool odd = place.quad % 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = (int64_t(problem) * a.seqlen_q + place.row + place.group + 8 * half) * a.seqlen_k;
    uint32_t bits = 0;
    if (a.seqlen_k % 4 == 0) {
#pragma unroll 1
      for (int j = 0; j < kS / 16; ++j) {
        bits |= kept_of_four(a.dropout, seed, row + 16 * j + 8 * odd + place.quad / 2 * 4) << (4 * j);
      }
      const uint32_t got = __shfl_xor_sync(0xffffffffu, bits, 1);
      constexpr uint32_t kFirst = 0x33333333u;  // the first two of each four
      bits = odd ? (got >> 2 & kFirst) | (bits & ~kFirst) : (bits & kFirst) | (got & kFirst) << 2;
    } else {
#pragma unroll 1
      for (int i = 0; i < kS / 8; ++i) {
        const int64_t index = row + 8 * i + 2 * place.quad;
        const int word = int(index % 4);
        uint32_t four = kept_of_four(a.dropout, seed, index - word) >> word;
        if (word == 3) four |= kept_of_four(a.dropout, seed, index + 1) << 1;
        bits |= (four & 3) << (2 * i);
      }
    }
    kept[half] = bits;
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
                                           const ShortTensor& tensor, const ShortAttention& a, int problem, int rows,
                                           const Place& place) {
  T* const to = rows_of<T>(tensor, head_of(a, problem));
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

// Bytes of shared memory that a block asks for. In the backward, problems of 128 x 128 have one room for p and grad_s, in
// turn, and a second place for queries, and for grad_out where shared memory allows, so that the next problem's are on
// their way throughout: their blocks are too few for one to compute while another waits.
template <int kS>
constexpr bool kOneRoom = kS == 128;
template <int kS>
constexpr bool kQueriesAhead = kOneRoom<kS>;
template <int kS, int kD>
constexpr bool kGradientsAhead = kOneRoom<kS> && kD != 64;
template <int kS, int kD>
constexpr int kForwardBytes = 3 * kS * kD * 2;
template <int kS, int kD>
constexpr int kBackwardBytes = (4 + kQueriesAhead<kS> + kGradientsAhead<kS, kD>)*kS * kD * 2 +
                               (kOneRoom<kS> ? 1 : 2) * kS * kS * 2;

// Calls run(std::integral_constant<int, length>{}, std::integral_constant<int, head dim>{}) with the sizes of the
// smallest tiles that hold the problem.
template <int kS, class Run>
int with_head_dim(int head_dim, Run&& run) {
  using Length = std::integral_constant<int, kS>;
  if (head_dim <= 32) return run(Length{}, std::integral_constant<int, 32>{});
  if (head_dim <= 64) return run(Length{}, std::integral_constant<int, 64>{});
  return run(Length{}, std::integral_constant<int, 128>{});
}

template <class Run>
int with_tiles(const ShortAttention& a, Run&& run) {
  const int length = std::max(a.seqlen_q, a.seqlen_k);
  if (length <= 16) return with_head_dim<16>(a.head_dim, run);
  if (length <= 32) return with_head_dim<32>(a.head_dim, run);
  if (length <= 64) return with_head_dim<64>(a.head_dim, run);
  return with_head_dim<128>(a.head_dim, run);
}

// Blocks that stay, each taking problem after problem.
inline int launch_problems(void (*kernel)(ShortAttention), const ShortAttention& a, int threads, size_t shared,
                           const Device& device, void* stream) {
  if (int(shared) > device.shared_a_block) return FUSELINE_UNSUPPORTED;
  int count = 0;
  const cudaError_t error = resident_clusters(kernel, device, threads, shared, 1, count);
  if (error != cudaSuccess) return int(error);
  if (count == 0) return FUSELINE_UNSUPPORTED;
  return launch(kernel, a, std::min(a.problems, count), dim3(threads), shared, 1, stream);
}

// Defined one a source: attention_short_forward.cu, attention_short_backward_fp16.cu, attention_short_backward_bf16.cu.
int attention_short_forward(const ShortAttention& a, int dtype, const Device& device, void* stream);
int attention_short_backward_fp16(const ShortAttention& a, const Device& device, void* stream);
int attention_short_backward_bf16(const ShortAttention& a, const Device& device, void* stream);

}  // namespace fuseline::short_attention
