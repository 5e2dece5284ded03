// The norms' backward for many long rows by teams of blocks (norm_teams.cuh).
//
// Moves: as norm_backward_rows.cuh, with one row of partial sums a team. Limit: HBM bandwidth.
#pragma once

#include "norm_teams.cuh"

namespace fuseline {

struct TeamsBackward {
  NormBackward norm;
  Team team;
  int tensors;  // x, grad_y, and grad_sum if there is one
};

// kDrops: there may be grad_dropped, and a sum of it over rows.
template <class T, bool kCentred, bool kDrops>
__global__ void __launch_bounds__(kTeamThreads, 1) norm_backward_teams(const TeamsBackward given) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSize = kVector<T>, kSums = kCentred ? 2 : 1;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ TeamStatics statics;
  const NormBackward& a = given.norm;
  const Team& t = given.team;
  const int lane = int(threadIdx.x) % kWarp, warp = of_warp(int(threadIdx.x) / kWarp);
  const TeamSeat<T> seat(t, a.x, a.rows, a.n);
  const int warps = seat.warps, count = seat.count, meetings = t.ahead + 1, stage_bytes = given.tensors * t.part;
  const bool wants_rows = a.wants_rows();
  open_team(statics, t, warps);

  if (warp == warps) {
    if (lane > 0) return;
    const int bytes = seat.part.count * 16;
    const auto statistics_of = [&](int k) {
      const int64_t row = seat.row(t, k);
      return make_float2(kCentred ? a.mean[row] : 0.f, a.rstd[row]);
    };
    float2 next = count > 0 ? statistics_of(0) : make_float2(0.f, 0.f);
    int64_t at = seat.first_at;
    RingPlace to;
#pragma unroll 1
    for (int k = 0; k < count; ++k, at += seat.step) {
      if (k >= t.stages) barrier_wait(&statics.taken[to.at], to.parity ^ 1);
      statics.statistics[to.at] = next;
      uint64_t* const barrier = &statics.arrived[to.at];
      barrier_expect(barrier, bytes * given.tensors);
      unsigned char* const stage = ring + to.at * stage_bytes;
      if (bytes > 0) {
        copy_in(stage, static_cast<const T*>(a.x) + at, bytes, barrier);
        copy_in(stage + t.part, static_cast<const T*>(a.grad_y) + at, bytes, barrier);
        if (given.tensors > 2) copy_in(stage + 2 * t.part, static_cast<const T*>(a.grad_sum) + at, bytes, barrier);
      }
      if (k + 1 < count) next = statistics_of(k + 1);
      to.next(t.stages);
    }
    return;
  }
  if (warp > warps && !wants_rows) return;
  if (warp == warps + 1) {
    RingPlace of;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      barrier_wait(&statics.summed[of.at], of.parity);
      const float2 sums = sum_over_warp(lane < warps ? statics.sums[of.at][lane] : make_float2(0.f, 0.f));
      if (lane == 0) post(t.mail + seat.row(t, k) * t.blocks + seat.place, sums);
      of.next(meetings);
    }
    return;
  }
  if (warp > warps) {
    RingPlace of, stage;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      if (k % kCollectors == warp - warps - 2) {
        float2 sums = make_float2(0.f, 0.f);
        collect(t.mail + seat.row(t, k) * t.blocks, t.blocks, lane, [&](int, float2 posted) { sums = plus(sums, posted); });
        sums = sum_over_warp(sums);
        barrier_wait(&statics.arrived[stage.at], stage.parity);
        const float2 statistics = statics.statistics[stage.at];
        RowTerms terms;
        terms.mean = statistics.x, terms.rstd = statistics.y;
        terms.set(a, kCentred, sums.x, sums.y);
        if (lane == 0) {
          statics.terms[of.at] = make_float4(terms.scale, terms.offset, terms.slope, terms.mean);
          barrier_arrive(&statics.ready[of.at]);
        }
      }
      of.next(meetings);
      stage.next(t.stages);
    }
    return;
  }

  const int vector = int(threadIdx.x);
  const TeamVector<T> columns(seat.part, vector, seat.head, int(a.n));
  float weight[kSize], x_bias[kDrops ? kSize : 1] = {};
  weights_of_columns<T, true>(a, columns.inside ? columns.first : int(a.n), weight);
  ColumnSums<kSize, kSums> column_sums = {};
  const uint64_t seed = kDrops && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  RingPlace first_stage, first_meeting, stage, meeting;
  const auto first = [&] {
    barrier_wait(&statics.arrived[first_stage.at], first_stage.parity);
    const float2 statistics = statics.statistics[first_stage.at];
    float2 sums = make_float2(0.f, 0.f);
    if (columns.inside) {
      const unsigned char* const here = ring + first_stage.at * stage_bytes + vector * 16;
      float values[kSize], grad[kSize];
      columns.take(here, values);
      columns.take(here + t.part, grad);
      first_pass<kSize, kSums, kCentred>(values, grad, weight, statistics.x, statistics.y, column_sums, sums.x, sums.y);
    }
    if (wants_rows) {
      sums = sum_over_warp(sums);
      if (lane == 0) {
        statics.sums[first_meeting.at][warp] = sums;
        barrier_arrive(&statics.summed[first_meeting.at]);
      }
    }
    first_stage.next(t.stages);
    first_meeting.next(meetings);
  };
  const int ahead = min(t.ahead, count);
#pragma unroll 1
  for (int k = 0; k < ahead; ++k) first();
  int64_t at = seat.first_at + int64_t(vector) * kSize;
#pragma unroll 1
  for (int k = 0; k < count; ++k, at += seat.step) {
    if (k + ahead < count) first();
    if (wants_rows) {
      [[maybe_unused]] uint32_t kept = 0;
      if (kDrops && columns.inside && a.dropout.seed) {  // while the row meets
        kept = kept_of_slots<kSize, 1>(a.dropout, seed, at, 0);
      }
      barrier_wait(&statics.ready[meeting.at], meeting.parity);
      if (columns.inside) {
        const unsigned char* const here = ring + stage.at * stage_bytes + vector * 16;
        const float4 of_row = statics.terms[meeting.at];
        RowTerms terms;
        terms.scale = of_row.x, terms.offset = of_row.y, terms.slope = of_row.z, terms.mean = of_row.w;
        float values[kSize], grad[kSize];
        columns.take(here, values);
        columns.take(here + t.part, grad);
        second_pass<kSize, kCentred>(values, weight, terms, grad);
        if (given.tensors > 2) {
          columns.take(here + 2 * t.part, values);
#pragma unroll
          for (int i = 0; i < kSize; ++i) grad[i] += values[i];
        }
        if (a.grad_x) columns.put(static_cast<T*>(a.grad_x) + at, pack<T>(grad));
        if constexpr (kDrops) {
          if (a.dropout.seed) {
#pragma unroll
            for (int i = 0; i < kSize; ++i) grad[i] *= kept >> i & 1 ? a.dropout.scale : 0.f;
          }
          if (a.grad_dropped) columns.put(static_cast<T*>(a.grad_dropped) + at, pack<T>(grad));
#pragma unroll
          for (int i = 0; i < kSize; ++i) x_bias[i] += grad[i];
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&statics.taken[stage.at]);
    stage.next(t.stages);
    meeting.next(meetings);
  }

  if (!a.partials || !columns.inside) return;
  const auto write = [&](int kind, void* result, const auto& sums) {
    if (!result) return;
    float* const partials = a.partials + (int64_t(kind) * t.teams + seat.team) * a.columns;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int c = columns.first + i;
      if (!columns.has(i)) continue;
      if (t.teams > 1) {
        partials[c] = sums[i];
      } else if (a.fp32_weights) {
        static_cast<float*>(result)[c] = sums[i];
      } else {
        static_cast<T*>(result)[c] = from_float<T>(sums[i]);
      }
    }
  };
  write(0, a.grad_weight, column_sums.weight);
  if constexpr (kSums > 1) write(1, a.grad_bias, column_sums.bias);
  if constexpr (kDrops) write(2, a.grad_x_bias, x_bias);
#endif
}

}  // namespace fuseline
