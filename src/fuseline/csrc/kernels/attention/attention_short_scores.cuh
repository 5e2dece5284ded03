// Attention over short sequences: what happens to the scores of a warp's 16 rows: scale, mask, bounds, softmax, dropout.
#pragma once

#include "attention_short.cuh"

namespace fuseline::short_attention {

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
__device__ __forceinline__ void seen_keys(uint32_t (&kept)[2], const ShortAttention& a, const Extent& extent,
                                          const Place& place) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row + place.group + 8 * half + extent.shift;
    kept[half] = keys_to<kS>(min(row + a.last, extent.keys - 1), place.quad) & ~keys_to<kS>(row + a.first - 1, place.quad);
  }
}

// Applies the mask and hides keys; answers what the scores are still to be multiplied with to be powers of two. Of the
// longest problems those with bounds are kSkips, where kernels that skip are others: else bounds are asked for.
template <class T, int kS, bool kSkips, bool kAsks, bool kPacked>
__device__ __forceinline__ float apply_mask(float (&scores)[kS / 8][4], const ShortAttention& a, int problem,
                                            const Extent& extent, const Place& place) {
  float factor = a.scale * kLog2E;
  const bool by_place = kSkips || (kAsks && a.bounded) || extent.keys < kS;
  if (!kPacked && a.mask_kind > FUSELINE_MASK_BOOL) {
    const MaskPlace at = mask_place(a, problem, place);
    if (a.mask_kind == FUSELINE_MASK_ADD) {
      add_mask<T, kS>(scores, a, at, factor, place);
    } else {
      add_mask<float, kS>(scores, a, at, factor, place);
    }
    factor = 1.f;
  }
  if (by_place || (!kPacked && a.mask_kind == FUSELINE_MASK_BOOL)) {
    uint32_t kept[2] = {~0u, ~0u};
    if (by_place) seen_keys<kS>(kept, a, extent, place);
    if (!kPacked && a.mask_kind == FUSELINE_MASK_BOOL) kept_by_mask<kS>(kept, a, mask_place(a, problem, place), place);
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
template <class T, int kS, bool kSkips, bool kAsks, bool kPacked>
__device__ __forceinline__ RowSums exponentials(float (&scores)[kS / 8][4], const ShortAttention& a, int problem,
                                                const Extent& extent, const Place& place) {
  const float factor = apply_mask<T, kS, kSkips, kAsks, kPacked>(scores, a, problem, extent, place);
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

// What dropout keeps of elements first .. + 4, as bits; `first` is a multiple of 4.
__device__ __forceinline__ uint32_t kept_of_four(const Dropout& dropout, uint64_t seed, int64_t first) {
  uint32_t bits[4];
  random_bits(seed, first, bits);
  return uint32_t(bits[0] >= dropout.threshold) | uint32_t(bits[1] >= dropout.threshold) << 1 |
         uint32_t(bits[2] >= dropout.threshold) << 2 | uint32_t(bits[3] >= dropout.threshold) << 3;
}

// The elements that dropout keeps, for each of the two rows. Where rows start at multiples of four elements, two lanes
// share each block of words: the even lane draws those of the even tiles, the odd lane the others, and they exchange.
template <int kS, bool kPacked>
__device__ __forceinline__ void kept_by_dropout(uint32_t (&kept)[2], const ShortAttention& a, int problem,
                                                const Extent& extent, const Place& place) {
  const int all_keys = kPacked ? a.total_k : a.seqlen_k;
  const uint64_t seed = uint64_t(*a.dropout.seed);
  const bool odd = place.quad % 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row =
        (statistic_of<kPacked>(a, problem, extent) + place.row + place.group + 8 * half) * all_keys + extent.first_key;
    uint32_t bits = 0;
    if ((all_keys | extent.first_key) % 4 == 0) {
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

// Probabilities as the left side of a product; what dropout drops is zero.
template <class T, int kS, bool kPacked>
__device__ __forceinline__ void pack_kept(const float (&p)[kS / 8][4], uint32_t (&packed)[kS / 16][4],
                                          const ShortAttention& a, int problem, const Extent& extent, const Place& place) {
#pragma unroll
  for (int i = 0; i < kS / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      packed[i / 2][i % 2 * 2 + half] = pack_pair<T>(p[i][2 * half], p[i][2 * half + 1]);
    }
  }
  if (!a.dropout.seed) return;
  uint32_t kept[2];
  kept_by_dropout<kS, kPacked>(kept, a, problem, extent, place);
#pragma unroll
  for (int i = 0; i < kS / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      packed[i / 2][i % 2 * 2 + half] &=
          (has_bit(kept[half], i, 0) ? 0x0000ffffu : 0u) | (has_bit(kept[half], i, 1) ? 0xffff0000u : 0u);
    }
  }
}

// The warp's rows of out, and their lse.
template <class T, int kD, bool kPacked>
__device__ __forceinline__ void store_out(const float (&out)[kD / 8][4], const RowSums& sums, const ShortAttention& a,
                                          int problem, const Extent& extent, const Place& place) {
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row + place.group + 8 * half;
    factor[half] = sums.sum[half] == 0.f ? 0.f : (a.dropout.seed ? a.dropout.scale : 1.f) * fast_reciprocal(sums.sum[half]);
    if (a.lse && place.quad == 0 && row < extent.rows) {
      a.lse[statistic_of<kPacked>(a, problem, extent) + row] = sums.log2_sum[half] * kLn2;
    }
  }
  store_rows<T, kD>(out, factor[0], factor[1], a.out, a, problem, extent.first_row, extent.rows, place);
}

// What no packed sequence has: zeros in out, and nothing seen.
template <class T>
__device__ __forceinline__ void clear_out_behind(const ShortAttention& a) {
  const int from = start_of(a.starts_q, a.sequences);
  clear_behind<T>(a, a.out, from, a.total_q);
  if (a.lse == nullptr) return;
  const int64_t count = int64_t(a.total_q - from) * a.heads.by;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x) {
    a.lse[i % a.heads.by * a.total_q + from + i / a.heads.by] = -kInfinity;
  }
}

}  // namespace fuseline::short_attention
