// The norms' forward for many long rows by teams of blocks (norm_teams.cuh): weights are in registers, and what is normalized
// takes the place of what it was made of in shared memory.
//
// Moves: as norm_forward_rows.cuh. Limit: HBM bandwidth.
#pragma once

#include "norm_states.cuh"
#include "norm_teams.cuh"

namespace fuseline {

struct TeamsForward {
  NormForward norm;
  Team team;
};

template <class T, bool kAdded, bool kMasked>
__global__ void __launch_bounds__(kTeamThreads, 1) norm_forward_teams(const TeamsForward given) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSize = kVector<T>, kTensors = kAdded ? 2 : 1;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ TeamStatics statics;
  __shared__ float counts[kTeamWarps];
  const NormForward& a = given.norm;
  const Team& t = given.team;
  const int n = int(a.n), lane = int(threadIdx.x) % kWarp, warp = of_warp(int(threadIdx.x) / kWarp);
  const int warps = int(blockDim.x) / kWarp - 2 - kCollectors;
  const int team = int(blockIdx.x) / t.blocks, place = int(blockIdx.x) % t.blocks;
  const int count = team < a.rows ? int((a.rows - 1 - team) / t.teams) + 1 : 0;  // rows of the team
  const T* const normalized = static_cast<const T*>(kAdded ? a.residual : a.x);
  const int head = elements_into_vector(normalized + team * a.n);
  const TeamPart part(n, head, kSize, place, t.blocks);
  const int64_t first_at = team * a.n - head + int64_t(part.first) * kSize, step = t.teams * a.n;  // elements
  const int meetings = t.ahead + 1;
  const int vector = int(threadIdx.x), column = (part.first + vector) * kSize - head;
  const bool inside = vector < part.count, whole = column >= 0 && column + kSize <= n;
  const int own = inside && warp < warps ? min(n, column + kSize) - max(0, column) : 0;
  const float own_of_warp = sum_over_warp(float(own));
  if (lane == 0 && warp < warps) counts[warp] = own_of_warp;
  open_team(statics, t, warps);

  if (warp == warps) {
    if (lane > 0) return;
    const int bytes = part.count * 16;
    RingPlace to;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      if (k >= t.stages) barrier_wait(&statics.taken[to.at], to.parity ^ 1);
      uint64_t* const barrier = &statics.arrived[to.at];
      barrier_expect(barrier, bytes * kTensors);
      const int64_t at = first_at + k * step;
      unsigned char* const stage = ring + to.at * kTensors * t.part;
      if (bytes > 0) {
        copy_in(stage, normalized + at, bytes, barrier);
        if (kAdded) copy_in(stage + t.part, static_cast<const T*>(a.x) + at, bytes, barrier);
      }
      to.next(t.stages);
    }
    return;
  }
  if (warp == warps + 1) {
    const float of_block = sum_over_warp(lane < warps ? counts[lane] : 0.f), inverse = 1.f / fmaxf(of_block, 1.f);
    const float of_state = lane < warps ? counts[lane] : 0.f;
    RingPlace of;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      barrier_wait(&statics.summed[of.at], of.parity);
      const float2 state = lane < warps ? statics.sums[of.at][lane] : make_float2(0.f, 0.f);  // mean and squares
      const float near = a.centred ? __shfl_sync(kAllLanes, state.x, 0) : 0.f;
      const float apart = state.x - near, distance = of_state * apart;
      float2 sums = make_float2(0.f, 0.f);
      if (of_state > 0.f) sums = make_float2(distance, fmaf(distance, apart, state.y));
      sums = sum_over_warp(sums);
      const Moments all = a.centred ? about_mean(near, sums, of_block, inverse) : Moments{0.f, sums.y, of_block, 0.f};
      if (lane == 0) {
        post(t.mail + (team + int64_t(k) * t.teams) * t.blocks + place, make_float2(all.mean, all.squares));
      }
      of.next(meetings);
    }
    return;
  }
  if (warp > warps) {
    const int mine = warp - warps - 2;
    const float inverse_n = 1.f / float(n);
    float of_lane = 0.f;  // columns of the blocks that it collects from
#pragma unroll 1
    for (int block = lane; block < t.blocks; block += kWarp) {
      of_lane += float(TeamPart(n, head, kSize, block, t.blocks).columns(n, head, kSize));
    }
    RingPlace of;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      if (k % kCollectors == mine) {
        const int64_t row = team + int64_t(k) * t.teams;
        float near = 0.f;
        float2 sums = make_float2(0.f, 0.f);
        collect(t.mail + row * t.blocks, t.blocks, lane, [&](int block, float2 posted) {
          const float of_state = float(TeamPart(n, head, kSize, block, t.blocks).columns(n, head, kSize));
          if (block == lane) near = posted.x;  // of the first few blocks; that of each lane
          const float apart = posted.x - near, distance = of_state * apart;
          if (of_state > 0.f) sums.x += distance, sums.y += fmaf(distance, apart, posted.y);
        });
        float rows_squares = 0.f, mean = 0.f;
        if (a.centred) {  // each lane's are about its own; all are moved to the first lane's
          const float first_near = __shfl_sync(kAllLanes, near, 0), moved = near - first_near;
          float2 about = make_float2(0.f, 0.f);
          if (of_lane > 0.f) {
            about.x = fmaf(of_lane, moved, sums.x);
            about.y = sums.y + moved * (2.f * sums.x + of_lane * moved);
          }
          about = sum_over_warp(about);
          const Moments all = about_mean(first_near, about, float(n), inverse_n);
          mean = all.mean, rows_squares = all.squares;
        } else {
          rows_squares = sum_over_warp(sums).y;
        }
        const float rstd = rstd_of<T>(rows_squares, inverse_n, a.eps);
        if (lane == 0) {
          if (place == 0) keep_statistics(a, row, mean, rstd);
          statics.terms[of.at] = make_float4(mean, rstd, 0.f, 0.f);
          barrier_arrive(&statics.ready[of.at]);
        }
      }
      of.next(meetings);
    }
    return;
  }

  float weight[kSize], bias[kSize], x_bias[kMasked ? kSize : 1];
#pragma unroll
  for (int i = 0; i < kSize; ++i) weight[i] = 1.f, bias[i] = 0.f;
  if (a.weight) load_weights<T, false>(a.weight, a.fp32_weights, inside ? column : n, n, weight);
  if (a.bias) load_weights<T, false>(a.bias, a.fp32_weights, inside ? column : n, n, bias);
  if constexpr (kMasked) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x_bias[i] = 0.f;
    if (a.x_bias) load_weights<T, false>(a.x_bias, a.fp32_weights, inside ? column : n, n, x_bias);
  }
  const uint64_t seed = kMasked && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  const float scale = kMasked && a.dropout.seed ? a.dropout.scale : 1.f, inverse = 1.f / fmaxf(own_of_warp, 1.f);
  const auto is_column = [&](int i) { return column + i >= 0 && column + i < n; };
  const uint32_t wholes = __ballot_sync(kAllLanes, inside && whole);
  const int out_first = warp * kWarp + (wholes ? __ffs(int(wholes)) - 1 : 0), out_bytes = __popc(wholes) * 16;
  const auto place_of = [&](int stage, int tensor, int v) { return ring + (stage * kTensors + tensor) * t.part + v * 16; };
  const auto put = [&](void* tensor, int64_t at, int stage, int which, const uint4& raw, const float (&values)[kSize]) {
    T* const to = static_cast<T*>(tensor) + at;
    if (whole && t.bulk) {
      *reinterpret_cast<uint4*>(place_of(stage, which, vector)) = raw;
    } else if (whole) {
      *reinterpret_cast<uint4*>(to) = raw;
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (is_column(i)) to[i] = from_float<T>(values[i]);
      }
    }
  };
  RingPlace ahead_stage, ahead_meeting, stage, meeting;
  int64_t ahead_at = first_at + int64_t(vector) * kSize, at = ahead_at;
  const auto first = [&] {
    [[maybe_unused]] uint32_t kept = ~0u;
    if (kMasked && inside && a.dropout.seed) kept = kept_of_slots<kSize, 1>(a.dropout, seed, ahead_at, 0);
    barrier_wait(&statics.arrived[ahead_stage.at], ahead_stage.parity);
    float values[kSize] = {}, near = 0.f;
    if (inside) {
      uint4* const here = reinterpret_cast<uint4*>(ring + ahead_stage.at * kTensors * t.part + vector * 16);
      unpack<T>(*here, values);
      if constexpr (kAdded) {
        float added[kSize];
        unpack<T>(*reinterpret_cast<const uint4*>(reinterpret_cast<const unsigned char*>(here) + t.part), added);
        if constexpr (kMasked) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] = fmaf(added[i] + x_bias[i], kept >> i & 1 ? scale : 0.f, values[i]);
        } else {
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += added[i];
        }
        const uint4 raw = pack<T>(values);
        unpack<T>(raw, values);
        *here = raw;
        put(a.sum, ahead_at, ahead_stage.at, 0, raw, values);
      }
      near = values[0];
      if (!whole) {
#pragma unroll
        for (int i = kSize - 1; i >= 0; --i) {
          if (is_column(i)) near = values[i];
        }
      }
    }
    if (a.centred) {
      const float2 seen = sum_over_warp(inside ? make_float2(near, 1.f) : make_float2(0.f, 0.f));
      near = seen.y > 0.f ? seen.x / seen.y : 0.f;
    } else {
      near = 0.f;
    }
    if (kAdded && t.bulk) {
      show_to_copies();
      __syncwarp();
      if (lane == 0) {
        if (out_bytes > 0) {
          T* const to = static_cast<T*>(a.sum) + ahead_at + int64_t(out_first) * kSize - int64_t(vector) * kSize;
          copy_out_with(to, place_of(ahead_stage.at, 0, out_first), out_bytes);
        }
        commit_copies_out();
      }
    }
    float2 sums = make_float2(0.f, 0.f);
    if (inside) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (!whole && !is_column(i)) continue;
        const float apart = values[i] - near;
        sums.x += apart;
        sums.y = fmaf(apart, apart, sums.y);
      }
    }
    sums = sum_over_warp(sums);
    const Moments mine = a.centred ? about_mean(near, sums, own_of_warp, inverse) : Moments{0.f, sums.y, own_of_warp, 0.f};
    if (lane == 0) {
      statics.sums[ahead_meeting.at][warp] = make_float2(mine.mean, mine.squares);
      barrier_arrive(&statics.summed[ahead_meeting.at]);
    }
    ahead_at += step;
    ahead_stage.next(t.stages);
    ahead_meeting.next(meetings);
  };
  const int ahead = min(t.ahead, count);
#pragma unroll 1
  for (int k = 0; k < ahead; ++k) first();
#pragma unroll 1
  for (int k = 0; k < count; ++k, at += step) {
    if (k + ahead < count) first();
    barrier_wait(&statics.ready[meeting.at], meeting.parity);
    if (inside) {
      const float4 of_row = statics.terms[meeting.at];
      const Standard<T> standard(of_row.x, of_row.y);
      float values[kSize];
      unpack<T>(*reinterpret_cast<const uint4*>(ring + stage.at * kTensors * t.part + vector * 16), values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = fmaf(standard(values[i]), weight[i], bias[i]);
      put(a.y, at, stage.at, kTensors - 1, pack<T>(values), values);
    }
    if (kAdded || t.bulk) show_to_copies();  // copies take its place later
    __syncwarp();
    if (lane == 0) {
      if (t.bulk) {
        if (out_bytes > 0) {
          T* const to = static_cast<T*>(a.y) + at + int64_t(out_first) * kSize - int64_t(vector) * kSize;
          copy_out_with(to, place_of(stage.at, kTensors - 1, out_first), out_bytes);
        }
        commit_copies_out();
        if (k > 0) {  // of the row before all have been read; behind it came a sum, and this y
          wait_for_all_but<kAdded ? 2 : 1>();
          barrier_arrive(&statics.taken[stage.at == 0 ? t.stages - 1 : stage.at - 1]);
        }
      } else {
        barrier_arrive(&statics.taken[stage.at]);
      }
    }
    stage.next(t.stages);
    meeting.next(meetings);
  }
  if (t.bulk && lane == 0) wait_for_all_but<0>();
#endif
}

}  // namespace fuseline
