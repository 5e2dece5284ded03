// A whole decoding step (decode_step.cu): attention of its token, head by head.
#pragma once

#include "device/softmax_parts.cuh"
#include "step_words.cuh"
#include "device/vector.cuh"

namespace fuseline {

// Heads and stretches of positions, dealt to blocks from the last one on.
struct HeadWork {
  int position, splits, each;

  __device__ __forceinline__ HeadWork(const StepArguments& a, int position_) : position(position_) {
    const int count = position + 1 - lowest(a);
    splits = max(1, min(min((count + kStepKeys - 1) / kStepKeys, kMostStepSplits), int(gridDim.x) / a.heads));
    each = (count + splits - 1) / splits;
  }
  __device__ __forceinline__ int lowest(const StepArguments& a) const {
    return a.window > 0 ? max(0, position + 1 - a.window) : 0;
  }
  __device__ __forceinline__ int first() const { return int(gridDim.x) - 1 - int(blockIdx.x); }
};

template <class Shape>
struct HeadRoom {
  float raw[2][Shape::kHeadDim];  // query and key as they came
  float own[3][Shape::kHeadDim];  // turned; the query scaled
  float sums[Shape::kWarps][Shape::kHeadDim];
  float mosts[Shape::kWarps], totals[Shape::kWarps];
};

// Keys and values of earlier positions on their way to the L2, whose bytes weights may have pushed out.
template <class Shape>
__device__ __forceinline__ void prefetch_heads(const StepArguments& a, const StepLayer& w, const HeadWork& work) {
  constexpr int kRowBytes = Shape::kHeadDim * 2, kLines = kRowBytes / 128;
  for (int task = work.first(); task < a.heads * work.splits; task += int(gridDim.x)) {
    const int of = work.splits == 1 ? task : task / work.splits;
    const int64_t head = a.group == 1 ? of : of / a.group;
    const int begin = work.lowest(a) + (task - of * work.splits) * work.each, end = min(begin + work.each, work.position);
    for (int i = begin * kLines + int(threadIdx.x); i < end * kLines; i += Shape::kThreads) {
      const int64_t at = head * a.head_stride * 2 + int64_t(i) * 128;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(w.k + at));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(w.v + at));
    }
  }
}

template <class Shape>
__device__ __forceinline__ void attend(const StepArguments& a, const StepLayer& w, const HeadWork& work,
                                       uint32_t number, HeadRoom<Shape>& room) {
  using T = typename Shape::Element;
  constexpr int D = Shape::kHeadDim, kWarps = Shape::kWarps, kLanes = D / 8, kSlots = kWarp / kLanes;
  constexpr int kAhead = Shape::kVectors == 3 && D == 128 ? 1 : 2;  // keys and values under way, a lane; registers are short
  const int thread = thread_anew(), warp = thread / kWarp, lane = thread % kWarp;
  const int slot = lane / kLanes, place = lane % kLanes * 8;
  for (int task = work.first(); task < a.heads * work.splits; task += int(gridDim.x)) {
    if (task != work.first()) __syncthreads();
    const int head = work.splits == 1 ? task : task / work.splits, split = task - head * work.splits;
    const int kv_head = a.group == 1 ? head : head / a.group;
    const int begin = work.lowest(a) + split * work.each, end = min(begin + work.each, work.position + 1);
    const bool newest = begin <= work.position && work.position < end;
    const int earlier = min(end, work.position);
    T* const k = reinterpret_cast<T*>(w.k) + kv_head * a.head_stride;
    T* const v = reinterpret_cast<T*>(w.v) + kv_head * a.head_stride;
    uint4 k_raw[kAhead], v_raw[kAhead];
    const auto key_of = [&](int from, int u) { return from + (u * kWarps + warp) * kSlots + slot; };
    const auto load = [&](const T* rows, int from, uint4 (&raw)[kAhead]) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int key = key_of(from, u);
        raw[u] = make_uint4(0, 0, 0, 0);
        if (key < earlier) raw[u] = *reinterpret_cast<const uint4*>(rows + int64_t(key) * D + place);
      }
    };
    load(k, begin, k_raw);
    load(v, begin, v_raw);

    const int which = thread / D, d = thread % D;
    float value = 0.f;
    if (which < (newest ? 3 : 1)) {
      const int row = (which == 0 ? head : a.heads + (which - 1) * a.kv_heads + kv_head) * D + d;
      uint32_t word;
      until([&] {
        word = look(a.to.qkv + row);
        return (word >> 16 ^ number & 0xffffu) == 0;
      });
      value = to_float(element_of<T>(word));
    }
    if (a.cos) {
      if (which < 2) room.raw[which][d] = value;
      __syncthreads();
      if (which < (newest ? 2 : 1)) {
        const int64_t at = int64_t(work.position) * (D / 2) + d % (D / 2);
        const float other = room.raw[which][(d + D / 2) % D];
        value = fmaf(value, __ldg(a.cos + at), (d < D / 2 ? -other : other) * __ldg(a.sin + at));
      }
    }
    if (which < (newest ? 3 : 1)) {
      if (which == 0) {
        value *= a.scale;
      } else {
        const T kept = from_float<T>(value);
        if (kv_head * a.group == head) (which == 1 ? k : v)[int64_t(work.position) * D + d] = kept;
        value = to_float(kept);
      }
      room.own[which][d] = value;
    }
    __syncthreads();

    float q[8], sum[8] = {}, most = -kInfinity, total = 0.f;
#pragma unroll
    for (int e = 0; e < 8; ++e) q[e] = room.own[0][place + e];
    const auto score_of = [&](const float (&x)[8]) {
      float score = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) score = fmaf(q[e], x[e], score);
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(~0u, score, offset);
      return score;
    };
    const auto raise = [&](float highest) {
      const float keep = weight_of(most, highest);
      total *= keep;
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] *= keep;
      most = highest;
    };
    const auto add = [&](float score, const float (&x)[8]) {
      const float weight = weight_of(score, most);
      total += weight;
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] = fmaf(weight, x[e], sum[e]);
    };
    for (int from = begin; from < earlier; from += kAhead * kWarps * kSlots) {
      float scores[kAhead], highest = most, x[8];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        unpack<T>(k_raw[u], x);
        const float score = score_of(x);
        scores[u] = key_of(from, u) < earlier ? score : -kInfinity;
        highest = fmaxf(highest, scores[u]);
      }
      load(k, from + kAhead * kWarps * kSlots, k_raw);
      raise(highest);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        unpack<T>(v_raw[u], x);
        add(scores[u], x);
      }
      load(v, from + kAhead * kWarps * kSlots, v_raw);
    }
    if (newest && warp == 0) {
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = room.own[1][place + e];
      const float theirs = score_of(x), score = slot == 0 ? theirs : -kInfinity;
      raise(fmaxf(most, score));
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = room.own[2][place + e];
      add(score, x);
    }
#pragma unroll
    for (int offset = kLanes; offset < kWarp; offset *= 2) {
      const float theirs = __shfl_xor_sync(~0u, most, offset), highest = fmaxf(most, theirs);
      const float kept = weight_of(most, highest), theirs_kept = weight_of(theirs, highest);
      total = total * kept + __shfl_xor_sync(~0u, total, offset) * theirs_kept;
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] = sum[e] * kept + __shfl_xor_sync(~0u, sum[e], offset) * theirs_kept;
      most = highest;
    }
    if (slot == 0) {
#pragma unroll
      for (int e = 0; e < 8; ++e) room.sums[warp][place + e] = sum[e];
      if (place == 0) room.mosts[warp] = most, room.totals[warp] = total;
    }
    __syncthreads();
    if (thread < D) {  // a warp's part to a lane: what it weighs in the whole
      const float theirs = lane < kWarps ? room.mosts[lane] : -kInfinity, highest = most_of_warp(theirs);
      const float kept = weight_of(theirs, highest);
      const float all = sum_of_warp(lane < kWarps ? kept * room.totals[lane] : 0.f);
      float together = 0.f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) together = fmaf(__shfl_sync(~0u, kept, i), room.sums[i][thread], together);
      const int64_t of = int64_t(split) * a.heads + head;
      send(a.to.gathered + of * D + thread, all > 0.f ? together / all : 0.f, number);
      if (thread == 0 && work.splits > 1) send(a.to.lse + of, all > 0.f ? highest + log2f(all) : -kInfinity, number);
    }
  }
}

// What all heads gathered, to shared memory; splits are added up by what their positions weigh.
template <class Shape>
__device__ __forceinline__ void gather_heads(const StepArguments& a, const HeadWork& work, uint32_t number,
                                             typename Shape::Element* to) {
  using T = typename Shape::Element;
  constexpr int D = Shape::kHeadDim;
  for (int i = threadIdx.x; i < a.heads * D; i += Shape::kThreads) {
    if (work.splits == 1) {
      uint64_t value;
      until([&] {
        value = look(a.to.gathered + i);
        return uint32_t(value >> 32) == number;
      });
      to[i] = from_float<T>(__uint_as_float(uint32_t(value)));
      continue;
    }
    float most = -kInfinity, total = 0.f, sum = 0.f;
    for (int split = 0; split < work.splits; ++split) {
      const int64_t of = int64_t(split) * a.heads + i / D;
      uint64_t value, lse;
      until([&] {
        value = look(a.to.gathered + of * D + i % D), lse = look(a.to.lse + of);
        return uint32_t(value >> 32) == number && uint32_t(lse >> 32) == number;
      });
      const float theirs = __uint_as_float(uint32_t(lse)), highest = fmaxf(most, theirs);
      const float keep = weight_of(most, highest), weight = weight_of(theirs, highest);
      sum = sum * keep + weight * __uint_as_float(uint32_t(value));
      total = total * keep + weight;
      most = highest;
    }
    to[i] = from_float<T>(sum / total);
  }
  __syncthreads();
}

}  // namespace fuseline
