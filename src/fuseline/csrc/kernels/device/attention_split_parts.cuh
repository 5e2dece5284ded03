// What the blocks of attention_split.cuh leave of each row, and how the parts of a row are added up.
#pragma once

#include "attention_arrivals.cuh"
#include "attention_scores.cuh"

namespace fuseline {

struct Split {
  Attention a;
  float* sums;     // [splits][batch * heads * rows][head_dim]
  float2* totals;  // [splits][batch * heads * rows]: reference and total, for powers of two
  int64_t rows;    // batch * heads * rows
  int splits;      // blocks that share the keys of a head
  int chunks;      // of the rows of a key head
  Arrivals* arrivals;  // [batch * kv_heads], if the last block adds up the parts, else null
};

constexpr int kMostSplits = 64, kPartsAtOnce = 16;

// What the parts of a row are multiplied by; every lane of a warp has those of parts `lane` and `lane` + 32.
struct PartWeights {
  float weights[kMostSplits / 32], zero, total;  // total: of the row, sink and all, relative to `zero`

  __device__ __forceinline__ PartWeights(const Split& g, int64_t row, int head) {
    const int lane = threadIdx.x % 32;
    float2 totals[kMostSplits / 32];
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) {
      const int part = 32 * i + lane;
      totals[i] = part < g.splits ? __ldcg(g.totals + part * g.rows + row) : make_float2(-kInfinity, 0.f);
    }
    const fuseline_attention& c = g.a.call;
    const float sink = c.sinks != nullptr ? c.sinks[head] * kLog2E : -kInfinity;
    float most = sink;
#pragma unroll
    for (const float2& one : totals) most = fmaxf(most, one.x);
#pragma unroll
    for (int other = 16; other > 0; other /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, other));
    zero = most == -kInfinity ? 0.f : most;
    total = 0.f;
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) {
      weights[i] = power_of_two(totals[i].x - zero);
      total = fmaf(totals[i].y, weights[i], total);
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) total += __shfl_xor_sync(0xffffffffu, total, other);
    total += power_of_two(sink - zero);
  }
  __device__ __forceinline__ float lse() const { return total > 0.f ? (zero + log2f(total)) * kLn2 : -kInfinity; }
};

// Adds up the parts of a row: a warp a row, four columns a lane, parts in their order and kAtOnce of them on their way at once.
template <class T, int kD>
__device__ __forceinline__ void add_parts(const Split& g, int64_t row, int head, T* out) {
  constexpr int kAtOnce = kPartsAtOnce;
  const int lane = threadIdx.x % 32, head_dim = int(g.a.call.head_dim);
  const PartWeights parts(g, row, head);
#pragma unroll 1
  for (int first = 0; first < kD; first += 128) {
    const int column = first + 4 * lane;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int part = 0; part < g.splits; part += kAtOnce) {
      float4 ones[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        ones[i] = column < head_dim && part + i < g.splits
                      ? __ldcg(reinterpret_cast<const float4*>(g.sums + ((part + i) * g.rows + row) * head_dim + column))
                      : make_float4(0.f, 0.f, 0.f, 0.f);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = __shfl_sync(0xffffffffu, part < 32 ? parts.weights[0] : parts.weights[1], (part + i) % 32);
        sum.x = fmaf(weight, ones[i].x, sum.x), sum.y = fmaf(weight, ones[i].y, sum.y);
        sum.z = fmaf(weight, ones[i].z, sum.z), sum.w = fmaf(weight, ones[i].w, sum.w);
      }
    }
    if (column < head_dim) {
      const float by = parts.total > 0.f ? 1.f / parts.total : 0.f;
      *reinterpret_cast<uint2*>(out + column) =
          make_uint2(pack_pair<T>(sum.x * by, sum.y * by), pack_pair<T>(sum.z * by, sum.w * by));
    }
  }
  if (lane == 0) g.a.call.lse[row] = parts.lse();
}

}  // namespace fuseline
