// The parts of attention over a long cache (attention_split.cuh) and their sum, out and lse of every row: reads the parts
// once, which the L2 still holds. Limit: latency. It comes while the kernel of the parts ends.
#pragma once

#include "device/attention_launch.cuh"
#include "device/attention_scores.cuh"
#include "device/attention_tiles.cuh"

namespace fuseline {

struct Split {
  Attention a;
  float* sums;     // [splits][batch * heads * rows][head_dim]
  float2* totals;  // [splits][batch * heads * rows]: reference and total, for powers of two
  int64_t rows;    // batch * heads * rows
  int splits;      // blocks that share the keys of a head
  int chunks;      // of the rows of a key head
};

// A row's parts, or the only one, with the sink: what its sums are multiplied with, and its lse. `reference`: the parts' highest.
struct RowResult {
  float factor, lse;
  __device__ __forceinline__ RowResult(const fuseline_attention& c, int head, float reference, float total) {
    const float sink = c.sinks != nullptr ? c.sinks[head] * kLog2E : -kInfinity;
    const float most = fmaxf(sink, reference), zero = most == -kInfinity ? 0.f : most;
    const float weight = power_of_two(reference - zero), all = fmaf(total, weight, power_of_two(sink - zero));
    factor = all > 0.f ? weight / all : 0.f;
    lse = all > 0.f ? (zero + log2f(all)) * kLn2 : -kInfinity;
  }
};

// Adds up the parts of a row: a block a row, a thread a column. The parts come to shared memory, all on their way at once:
// with 33 of them, what waits for one after another takes 20 us.
constexpr int kCombineThreads = 256;

template <class T>
__global__ void __launch_bounds__(kCombineThreads) attention_combine(const __grid_constant__ Split g, int) {
  const fuseline_attention& c = g.a.call;
  extern __shared__ __align__(16) unsigned char shared[];
  float* const lines = reinterpret_cast<float*>(shared);  // [splits][head_dim]
  __shared__ float weights[kMostKeySplits];
  const int lane = threadIdx.x % 32, head_dim = int(c.head_dim), vectors = head_dim / 4;
  const int64_t row = blockIdx.x;
  const int head = int(row / c.seqlen_q % c.heads);
  wait_for_earlier();
  for (int at = threadIdx.x; at < g.splits * vectors; at += kCombineThreads) {
    const int part = at / vectors, column = at % vectors * 4;
    copy_bytes(lines + part * head_dim + column, g.sums + (part * g.rows + row) * head_dim + column, 16);
  }
  end_copies();
  float2 totals[kMostKeySplits / 32];  // of parts lane, lane + 32; every warp has them
#pragma unroll
  for (int i = 0; i < kMostKeySplits / 32; ++i) {
    const int part = 32 * i + lane;
    totals[i] = part < g.splits ? g.totals[part * g.rows + row] : make_float2(-kInfinity, 0.f);
  }
  const float sink = c.sinks != nullptr ? c.sinks[head] * kLog2E : -kInfinity;
  float most = sink;
#pragma unroll
  for (const float2& one : totals) most = fmaxf(most, one.x);
#pragma unroll
  for (int other = 16; other > 0; other /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, other));
  const float zero = most == -kInfinity ? 0.f : most;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kMostKeySplits / 32; ++i) {
    const float weight = power_of_two(totals[i].x - zero);
    if (threadIdx.x < 32) weights[32 * i + lane] = weight;
    total = fmaf(totals[i].y, weight, total);
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) total += __shfl_xor_sync(0xffffffffu, total, other);
  total += power_of_two(sink - zero);
  wait_copies<0>();
  __syncthreads();

  const int column = threadIdx.x;
  if (column < head_dim) {
    float sum = 0.f;
#pragma unroll 8
    for (int part = 0; part < g.splits; ++part) sum = fmaf(weights[part], lines[part * head_dim + column], sum);
    T* const out = static_cast<T*>(c.out) + row / c.seqlen_q / c.heads * c.out_strides[0] + head * c.out_strides[1] +
                   row % c.seqlen_q * c.out_strides[2];
    out[column] = from_float<T>(total == 0.f ? 0.f : sum / total);  // NaN stays
  }
  if (threadIdx.x == 0) c.lse[row] = total > 0.f ? (zero + log2f(total)) * kLn2 : -kInfinity;
}

// The same of few parts, where rows are many: a warp a row, four columns a lane.
template <class T>
__global__ void __launch_bounds__(kCombineThreads) attention_combine_few(const __grid_constant__ Split g, int) {
  const fuseline_attention& c = g.a.call;
  const int lane = threadIdx.x % 32, head_dim = int(c.head_dim);
  const int64_t row = int64_t(blockIdx.x) * (kCombineThreads / 32) + threadIdx.x / 32;
  const int head = int(row / c.seqlen_q % c.heads);
  wait_for_earlier();
  if (row >= g.rows) return;
  float4 parts[kFewKeySplits];
  const auto load = [&](int column) {
#pragma unroll
    for (int part = 0; part < kFewKeySplits; ++part) {
      const bool there = part < g.splits && column < head_dim;
      parts[part] = there ? *reinterpret_cast<const float4*>(g.sums + (part * g.rows + row) * head_dim + column)
                          : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  };
  float2 totals[kFewKeySplits];
#pragma unroll
  for (int part = 0; part < kFewKeySplits; ++part) {
    totals[part] = part < g.splits ? g.totals[part * g.rows + row] : make_float2(-kInfinity, 0.f);
  }
  load(4 * lane);
  float most = -kInfinity, total = 0.f;
#pragma unroll
  for (const float2& one : totals) most = fmaxf(most, one.x);
  const float zero = most == -kInfinity ? 0.f : most;
#pragma unroll
  for (float2& one : totals) {
    one.x = power_of_two(one.x - zero);  // the part's weight
    total = fmaf(one.y, one.x, total);
  }
  const RowResult result(c, head, most, total);
  if (lane == 0) c.lse[row] = result.lse;
  T* const out = static_cast<T*>(c.out) + row / c.seqlen_q / c.heads * c.out_strides[0] + head * c.out_strides[1] +
                 row % c.seqlen_q * c.out_strides[2];
  for (int column = 4 * lane; column < head_dim;) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int part = 0; part < kFewKeySplits; ++part) {
      sum.x = fmaf(totals[part].x, parts[part].x, sum.x), sum.y = fmaf(totals[part].x, parts[part].y, sum.y);
      sum.z = fmaf(totals[part].x, parts[part].z, sum.z), sum.w = fmaf(totals[part].x, parts[part].w, sum.w);
    }
    *reinterpret_cast<uint2*>(out + column) = make_uint2(pack_pair<T>(sum.x * result.factor, sum.y * result.factor),
                                                         pack_pair<T>(sum.z * result.factor, sum.w * result.factor));
    column += 128;
    load(column);
  }
}

}  // namespace fuseline
