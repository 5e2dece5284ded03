// The kernel of one decoding step of attention.
//
// Moves: the keys and values that the row holds, once: 2 * kv_heads * length * head_dim elements. At 200 positions of a
// 7B model that is 3.3 MB, 1.1 us; the launch, not the bytes, is what it costs. Limit: latency.
//
// Threads: a block of 4 warps has one key head, up to 4 of the query heads that share it, and a stretch of the
// positions. A key is spread over as many lanes as it has 16-byte vectors (8-byte ones in 8 bits), so that a warp looks
// at several keys at once, each slot with a softmax of its own; 4 keys and values a lane are under way. Slots meet by
// shuffles, warps in shared memory. Up to 8 blocks of a context are a cluster, which adds up out of each other's shared
// memory; more leave their parts in `partials`, and the last to arrive adds up all. Both in the order of blocks. What does
// not come from the launch before (angles, the first keys and values) is asked for before that has ended.
#pragma once

#include "decode_inbox.cuh"
#include "device/overlap.cuh"

namespace fuseline {

template <class T, bool kByte, int D, int G>
__global__ void __launch_bounds__(kDecodeThreads) decode_attention(const __grid_constant__ DecodeArguments a) {
  using Of = Piece<T, kByte>;
  constexpr int E = Of::kElements, kLanes = D / E, kSlots = kWarp / kLanes, kPairs = D / 64;
  using Raw = typename Of::Raw;
  __shared__ float q_shared[G][D];
  __shared__ float new_shared[2][D];
  __shared__ float sums[kDecodeWarps][G][D];
  __shared__ float mosts[kDecodeWarps][G], totals[kDecodeWarps][G];
  __shared__ float kept_shared[kMostDecodeBlocks][G];
  __shared__ Inbox<D, G> inbox;
  __shared__ bool last;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int split = blockIdx.x, kv_head = blockIdx.y / a.parts, part = blockIdx.y % a.parts, row = blockIdx.z;
  const int first_head = kv_head * a.group + part * G, heads = min(G, a.group - part * G);
  if (a.clustered) inbox.open(a.splits, heads);
  const int position = int(a.lengths[row]);
  const int lowest = a.window > 0 ? max(0, position + 1 - a.window) : 0;
  const int each = (position + 1 - lowest + a.splits - 1) / a.splits;
  const int begin = lowest + split * each, end = min(begin + each, position + 1);
  const bool newest = begin <= position && position < end;

  char* const k = a.k + (row * a.batch_stride + kv_head * a.head_stride) * Of::kBytes;
  char* const v = a.v + (row * a.batch_stride + kv_head * a.head_stride) * Of::kBytes;
  const int64_t scale_row = kByte ? row * a.scale_batch_stride + kv_head * a.scale_head_stride : 0;
  const float* const k_scales = a.k_scales + scale_row;
  const float* const v_scales = a.v_scales + scale_row;

  const int slot = lane / kLanes, place = lane % kLanes * E;
  const int earlier = min(end, position);
  Raw k_raw[kAhead], v_raw[kAhead];
  [[maybe_unused]] float k_scale[kAhead], v_scale[kAhead];
  const auto load = [&](int from) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int key = from + (u * kDecodeWarps + warp) * kSlots + slot;
      k_raw[u] = v_raw[u] = Raw{};
      k_scale[u] = v_scale[u] = 0.f;
      if (key < earlier) {
        k_raw[u] = *reinterpret_cast<const Raw*>(k + (int64_t(key) * D + place) * Of::kBytes);
        v_raw[u] = *reinterpret_cast<const Raw*>(v + (int64_t(key) * D + place) * Of::kBytes);
        if constexpr (kByte) k_scale[u] = k_scales[key], v_scale[u] = v_scales[key];
      }
    }
  };
  load(begin);
  float cosine[kPairs], sine[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t at = int64_t(position) * (D / 2) + lane + kWarp * i;
    cosine[i] = a.cos ? __ldg(a.cos + at) : 1.f, sine[i] = a.cos ? __ldg(a.sin + at) : 0.f;
  }
  // What follows, a product as a rule, gets its weights under way while this waits for its queries: HBM has little else to do.
  let_next_start();
  wait_for_earlier();

  // A head to a warp: queries, and where this block has the newest position its key and value.
  const T* const qkv = reinterpret_cast<const T*>(a.qkv) + row * a.qkv_stride;
  for (int task = warp; task < G + (newest ? 2 : 0); task += kDecodeWarps) {
    const bool is_query = task < G;
    if (is_query && task >= heads) {
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i) q_shared[task][lane + kWarp * i] = 0.f;
      continue;
    }
    const int head = is_query ? first_head + task : a.heads + (task - G) * a.kv_heads + kv_head;
    float x[2][kPairs];  // element i and its partner, half a head on
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      x[0][i] = to_float(qkv[int64_t(head) * D + lane + kWarp * i]);
      x[1][i] = to_float(qkv[int64_t(head) * D + lane + kWarp * i + D / 2]);
    }
    if (task <= G) {  // not the value
      const T* const norm = reinterpret_cast<const T*>(is_query ? a.q_norm : a.k_norm);
      if (norm) {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) squares += x[0][i] * x[0][i] + x[1][i] * x[1][i];
        const float rstd = rsqrtf(sum_of_warp(squares) / D + a.eps);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          x[0][i] *= rstd * to_float(norm[lane + kWarp * i]);
          x[1][i] *= rstd * to_float(norm[lane + kWarp * i + D / 2]);
        }
      }
      if (a.cos) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const float one = x[0][i], other = x[1][i];
          x[0][i] = one * cosine[i] - other * sine[i];
          x[1][i] = other * cosine[i] + one * sine[i];
        }
      }
    }
    if (is_query) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        q_shared[task][lane + kWarp * i] = x[0][i] * a.scale;
        q_shared[task][lane + kWarp * i + D / 2] = x[1][i] * a.scale;
      }
      continue;
    }
    float scale = 1.f, inverse = 1.f;
    if constexpr (kByte) {
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) most = fmaxf(most, fmaxf(fabsf(x[0][i]), fabsf(x[1][i])));
      scale = most_of_warp(most) / (a.fp8 ? 448.f : 127.f);
      inverse = scale > 0.f ? 1.f / scale : 0.f;
      if (lane == 0 && part == 0) (task == G ? a.k_scales : a.v_scales)[scale_row + position] = scale;
    }
    char* const to = (task == G ? k : v) + int64_t(position) * D * Of::kBytes;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const float value = x[i / kPairs][i % kPairs];
      const int at = lane + kWarp * (i % kPairs) + i / kPairs * (D / 2);
      if constexpr (kByte) {
        const uint32_t byte = to_byte(value * inverse, a.fp8);
        if (part == 0) to[at] = char(byte);
        new_shared[task - G][at] = from_byte(byte, a.fp8) * scale;
      } else {
        const T kept = from_float<T>(value);
        if (part == 0) reinterpret_cast<T*>(to)[at] = kept;
        new_shared[task - G][at] = to_float(kept);
      }
    }
  }
  __syncthreads();

  float q[G][E], sum[G][E] = {}, most[G], total[G] = {};
#pragma unroll
  for (int g = 0; g < G; ++g) {
    most[g] = -kInfinity;
#pragma unroll
    for (int e = 0; e < E; ++e) q[g][e] = q_shared[g][place + e];
  }
  // Takes up to kAhead keys a slot: scores in, sums out.
  const auto take = [&](auto& scores, const auto& values, auto count) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float highest = most[g];
#pragma unroll
      for (int u = 0; u < count.value; ++u) highest = fmaxf(highest, scores[g][u]);
      const float keep = weight_of(most[g], highest);
      total[g] *= keep;
#pragma unroll
      for (int e = 0; e < E; ++e) sum[g][e] *= keep;
#pragma unroll
      for (int u = 0; u < count.value; ++u) {
        const float weight = weight_of(scores[g][u], highest);
        total[g] += weight;
#pragma unroll
        for (int e = 0; e < E; ++e) sum[g][e] = fmaf(weight, values[u][e], sum[g][e]);
      }
      most[g] = highest;
    }
  };
  constexpr int kStep = kAhead * kDecodeWarps * kSlots;
  for (int from = begin; from < earlier; from += kStep) {
    float scores[G][kAhead], values[kAhead][E];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int key = from + (u * kDecodeWarps + warp) * kSlots + slot;
      float x[E];
      Of::widen(k_raw[u], x, a.fp8);
#pragma unroll
      for (int g = 0; g < G; ++g) {
        float score = 0.f;
#pragma unroll
        for (int e = 0; e < E; ++e) score = fmaf(q[g][e], x[e], score);
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(~0u, score, offset);
        if constexpr (kByte) score *= k_scale[u];
        scores[g][u] = key < earlier ? score : -kInfinity;
      }
      Of::widen(v_raw[u], values[u], a.fp8);
      if constexpr (kByte) {
#pragma unroll
        for (int e = 0; e < E; ++e) values[u][e] *= v_scale[u];
      }
    }
    load(from + kStep);
    take(scores, values, std::integral_constant<int, kAhead>{});
  }
  if (newest && warp == 0) {
    float scores[G][1], values[1][E];
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float score = 0.f;
#pragma unroll
      for (int e = 0; e < E; ++e) score = fmaf(q[g][e], new_shared[0][place + e], score);
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(~0u, score, offset);
      scores[g][0] = slot == 0 ? score : -kInfinity;
    }
#pragma unroll
    for (int e = 0; e < E; ++e) values[0][e] = new_shared[1][place + e];
    take(scores, values, std::integral_constant<int, 1>{});
  }

#pragma unroll
  for (int offset = kLanes; offset < kWarp; offset *= 2) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const float theirs = __shfl_xor_sync(~0u, most[g], offset), highest = fmaxf(most[g], theirs);
      const float mine_kept = weight_of(most[g], highest), theirs_kept = weight_of(theirs, highest);
      total[g] = total[g] * mine_kept + __shfl_xor_sync(~0u, total[g], offset) * theirs_kept;
#pragma unroll
      for (int e = 0; e < E; ++e) {
        sum[g][e] = sum[g][e] * mine_kept + __shfl_xor_sync(~0u, sum[g][e], offset) * theirs_kept;
      }
      most[g] = highest;
    }
  }
  if (slot == 0) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
#pragma unroll
      for (int e = 0; e < E; ++e) sums[warp][g][place + e] = sum[g][e];
      if (place == 0) mosts[warp][g] = most[g], totals[warp][g] = total[g];
    }
  }
  __syncthreads();

  T* const y = reinterpret_cast<T*>(a.y) + (int64_t(row) * a.heads + first_head) * D;
  const auto highest_of = [&](int g) {
    float highest = -kInfinity;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) highest = fmaxf(highest, mosts[w][g]);
    return highest;
  };
  const auto of_warps = [&](int g, const auto& part_of) {  // added up as they weigh
    const float highest = highest_of(g);
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) all = fmaf(weight_of(mosts[w][g], highest), part_of(w), all);
    return all;
  };
  const auto total_of = [&](int g) { return of_warps(g, [&](int w) { return totals[w][g]; }); };
  const auto sum_of = [&](int g, int d) { return of_warps(g, [&](int w) { return sums[w][g][d]; }); };
  if (a.clustered) {
    cluster_wait();
    static_assert(G <= kDecodeWarps);
    if (warp < heads && lane < a.splits) inbox.send_weights(warp, highest_of(warp), total_of(warp), split, lane);
    for (int i = 2 * threadIdx.x; i < heads * D; i += 2 * kDecodeThreads) {
      const int g = i / D, d = i % D;
      inbox.send(g, d, make_float2(sum_of(g, d), sum_of(g, d + 1)), split, a.splits);
    }
    inbox.add_up(split, a.splits, heads, y);
    return;
  }
  const int64_t place_of_block = (int64_t(row) * a.kv_heads + kv_head) * a.parts + part;
  constexpr int kRecord = D + 2;
  float* const record = a.partials + (place_of_block * a.splits + split) * G * kRecord;
  for (int i = threadIdx.x; i < heads * D; i += kDecodeThreads) {
    const int g = i / D, d = i % D;
    const float together = sum_of(g, d), all = total_of(g);
    if (a.splits == 1) {
      y[i] = from_float<T>(together / all);
    } else {
      record[g * kRecord + d] = together;
      if (d == 0) record[g * kRecord + D] = highest_of(g), record[g * kRecord + D + 1] = all;
    }
  }
  if (a.splits == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(a.arrivals + place_of_block, 1) == a.splits - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const float* const records = a.partials + place_of_block * a.splits * G * kRecord;
  for (int g = warp; g < heads; g += kDecodeWarps) {  // a block to a lane: its share of the whole
    const float* const theirs = records + (lane * G + g) * kRecord + D;
    const float most_there = lane < a.splits ? __ldcg(theirs) : -kInfinity;
    const float total_there = lane < a.splits ? __ldcg(theirs + 1) : 0.f;
    const float weight = weight_of(most_there, most_of_warp(most_there));
    const float all = sum_of_warp(weight * total_there);
    kept_shared[lane][g] = weight / all;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * D; i += kDecodeThreads) {
    const int g = i / D, d = i % D;
    float together = 0.f;
    constexpr int kTogether = 8;
    for (int first = 0; first < a.splits; first += kTogether) {
      float theirs[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int s = first + u;
        theirs[u] = s < a.splits ? __ldcg(records + (s * G + g) * kRecord + d) : 0.f;
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (first + u < a.splits) together = fmaf(kept_shared[first + u][g], theirs[u], together);
      }
    }
    y[i] = from_float<T>(together);
  }
  if (threadIdx.x == 0) a.arrivals[place_of_block] = 0;
}

}  // namespace fuseline
