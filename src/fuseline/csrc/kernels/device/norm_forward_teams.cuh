// The forward of norms of residual + dropout(x + x_bias) for many long rows by teams of blocks (norm_teams.cuh): a sum takes the
// place of its residual in shared memory until its row has met.
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

// kMasked: there may be a mask and a bias of x.
template <class T, bool kMasked>
__global__ void __launch_bounds__(kTeamThreads, 1) norm_forward_teams(const TeamsForward given) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSize = kVector<T>;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ TeamStatics statics;
  __shared__ float counts[kMostTeamWarps];  // columns of each warp
  const NormForward& a = given.norm;
  const Team& t = given.team;
  const int n = int(a.n), lane = int(threadIdx.x) % kWarp, warp = of_warp(int(threadIdx.x) / kWarp);
  const TeamSeat<T> seat(t, a.residual, a.rows, a.n);
  const int warps = seat.warps, count = seat.count, meetings = t.ahead + 1, stage_bytes = 2 * t.part;
  const int vector = int(threadIdx.x);
  const TeamVector<T> columns(seat.part, vector, seat.head, n);
  float own = 0.f;
  if (warp < warps) {
    if (columns.inside) own = float(min(n, columns.first + kSize) - max(0, columns.first));
    own = sum_over_warp(own);
    if (lane == 0) counts[warp] = own;
  }
  open_team(statics, t, warps);

  if (warp == warps) {
    if (lane > 0) return;
    const int bytes = seat.part.count * 16;
    int64_t at = seat.first_at;
    RingPlace to;
#pragma unroll 1
    for (int k = 0; k < count; ++k, at += seat.step) {
      if (k >= t.stages) barrier_wait(&statics.taken[to.at], to.parity ^ 1);
      uint64_t* const barrier = &statics.arrived[to.at];
      barrier_expect(barrier, bytes * 2);
      unsigned char* const stage = ring + to.at * stage_bytes;
      if (bytes > 0) {
        copy_in(stage, static_cast<const T*>(a.residual) + at, bytes, barrier);
        copy_in(stage + t.part, static_cast<const T*>(a.x) + at, bytes, barrier);
      }
      to.next(t.stages);
    }
    return;
  }
  if (warp == warps + 1) {
    const float of_state = lane < warps ? counts[lane] : 0.f, of_block = sum_over_warp(of_state);
    const float inverse = 1.f / fmaxf(of_block, 1.f);
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
      if (lane == 0) post(t.mail + seat.row(t, k) * t.blocks + seat.place, make_float2(all.mean, all.squares));
      of.next(meetings);
    }
    return;
  }
  if (warp > warps) {
    const float inverse_n = 1.f / float(n);
    const auto columns_of = [&](int block) {
      return float(TeamPart(n, seat.head, kSize, block, t.blocks).columns(n, seat.head, kSize));
    };
    float of_lane = 0.f;
#pragma unroll 1
    for (int block = lane; block < t.blocks; block += kWarp) of_lane += columns_of(block);
    RingPlace of;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      if (k % kCollectors == warp - warps - 2) {
        const int64_t row = seat.row(t, k);
        float near = 0.f;  // each lane's own at first
        float2 sums = make_float2(0.f, 0.f);
        collect(t.mail + row * t.blocks, t.blocks, lane, [&](int block, float2 posted) {
          if (a.centred && block == lane) near = posted.x;
          const float columns = columns_of(block), apart = posted.x - near, distance = columns * apart;
          if (columns > 0.f) sums = plus(sums, make_float2(distance, fmaf(distance, apart, posted.y)));
        });
        const float first_near = __shfl_sync(kAllLanes, near, 0), moved = near - first_near;
        if (of_lane > 0.f) {
          sums.y += moved * (2.f * sums.x + of_lane * moved);
          sums.x = fmaf(of_lane, moved, sums.x);
        }
        sums = sum_over_warp(sums);
        const Moments all =
            a.centred ? about_mean(first_near, sums, float(n), inverse_n) : Moments{0.f, sums.y, float(n), 0.f};
        const float rstd = rstd_of<T>(all.squares, inverse_n, a.eps);
        if (lane == 0) {
          if (seat.place == 0) keep_statistics(a, row, all.mean, rstd);
          statics.terms[of.at] = make_float4(all.mean, rstd, 0.f, 0.f);
          barrier_arrive(&statics.ready[of.at]);
        }
      }
      of.next(meetings);
    }
    return;
  }

  float weight[kSize], bias[kSize], x_bias[kMasked ? kSize : 1] = {};
  const int column = columns.inside ? columns.first : n;
#pragma unroll
  for (int i = 0; i < kSize; ++i) weight[i] = 1.f, bias[i] = 0.f;
  if (a.weight) load_weights<T, false>(a.weight, a.fp32_weights, column, n, weight);
  if (a.bias) load_weights<T, false>(a.bias, a.fp32_weights, column, n, bias);
  if constexpr (kMasked) {
    if (a.x_bias) load_weights<T, false>(a.x_bias, a.fp32_weights, column, n, x_bias);
  }
  const bool masks = kMasked && a.dropout.seed;
  const uint64_t seed = masks ? uint64_t(*a.dropout.seed) : 0;
  const float scale = masks ? a.dropout.scale : 1.f, inverse = 1.f / fmaxf(own, 1.f);
  RingPlace first_stage, first_meeting, stage, meeting;
  int64_t first_at = seat.first_at + int64_t(vector) * kSize, at = first_at;
  const auto first = [&] {
    [[maybe_unused]] uint32_t kept = ~0u;
    if (masks && columns.inside) kept = kept_of_slots<kSize, 1>(a.dropout, seed, first_at, 0);  // while it is on its way
    barrier_wait(&statics.arrived[first_stage.at], first_stage.parity);
    float values[kSize] = {}, near = 0.f;
    if (columns.inside) {
      unsigned char* const here = ring + first_stage.at * stage_bytes + vector * 16;
      float added[kSize];
      columns.take(here, values);
      columns.take(here + t.part, added);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if constexpr (kMasked) {
          values[i] = fmaf(added[i] + x_bias[i], kept >> i & 1 ? scale : 0.f, values[i]);
        } else {
          values[i] += added[i];
        }
      }
      const uint4 raw = pack<T>(values);
      unpack<T>(raw, values);
      *reinterpret_cast<uint4*>(here) = raw;
      columns.put(static_cast<T*>(a.sum) + first_at, raw);
      near = values[0];
      if (!columns.whole) {
#pragma unroll
        for (int i = kSize - 1; i >= 0; --i) near = columns.has(i) ? values[i] : near;
      }
    }
    if (a.centred) {
      const float2 seen = sum_over_warp(columns.inside ? make_float2(near, 1.f) : make_float2(0.f, 0.f));
      near = seen.y > 0.f ? seen.x / seen.y : 0.f;
    } else {
      near = 0.f;
    }
    float2 sums = make_float2(0.f, 0.f);  // of distances from it, and of their squares
    if (columns.inside) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float apart = columns.whole || columns.has(i) ? values[i] - near : 0.f;
        sums.x += apart;
        sums.y = fmaf(apart, apart, sums.y);
      }
    }
    sums = sum_over_warp(sums);
    const Moments mine = a.centred ? about_mean(near, sums, own, inverse) : Moments{0.f, sums.y, own, 0.f};
    if (lane == 0) {
      statics.sums[first_meeting.at][warp] = make_float2(mine.mean, mine.squares);
      barrier_arrive(&statics.summed[first_meeting.at]);
    }
    first_at += seat.step;
    first_stage.next(t.stages);
    first_meeting.next(meetings);
  };
  const int ahead = min(t.ahead, count);
#pragma unroll 1
  for (int k = 0; k < ahead; ++k) first();
#pragma unroll 1
  for (int k = 0; k < count; ++k, at += seat.step) {
    if (k + ahead < count) first();
    barrier_wait(&statics.ready[meeting.at], meeting.parity);
    if (columns.inside) {
      const float4 of_row = statics.terms[meeting.at];
      const Standard<T> standard(of_row.x, of_row.y);
      float values[kSize];
      unpack<T>(*reinterpret_cast<const uint4*>(ring + stage.at * stage_bytes + vector * 16), values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = fmaf(standard(values[i]), weight[i], bias[i]);
      columns.put(static_cast<T*>(a.y) + at, pack<T>(values));
    }
    show_to_copies();  // they take the place of sums
    __syncwarp();
    if (lane == 0) barrier_arrive(&statics.taken[stage.at]);
    stage.next(t.stages);
    meeting.next(meetings);
  }
#endif
}

}  // namespace fuseline
