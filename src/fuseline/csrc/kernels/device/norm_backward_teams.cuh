// The norms' backward for many long rows by teams of blocks (norm_teams.cuh): weights and sums over rows are in registers.
//
// Moves: as norm_backward_rows.cuh, and next to no partial sums: one row of them a team. Limit: HBM bandwidth.
#pragma once

#include "norm_teams.cuh"

namespace fuseline {

struct TeamsNorm {
  NormBackward norm;
  Team team;
  int tensors;  // x, grad_y, and grad_sum if there is one
};

template <class T, bool kCentred, bool kDrops>
__global__ void __launch_bounds__(kTeamThreads, 1) norm_backward_teams(const TeamsNorm given) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSize = kVector<T>, kSums = kCentred ? 2 : 1;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ TeamStatics statics;
  const NormBackward& a = given.norm;
  const Team& t = given.team;
  const int n = int(a.n), lane = int(threadIdx.x) % kWarp, warp = of_warp(int(threadIdx.x) / kWarp);
  const int warps = int(blockDim.x) / kWarp - 2 - kCollectors;
  const int team = int(blockIdx.x) / t.blocks, place = int(blockIdx.x) % t.blocks;
  const int count = team < a.rows ? int((a.rows - 1 - team) / t.teams) + 1 : 0;  // rows of the team
  const int head = elements_into_vector(static_cast<const T*>(a.x) + team * a.n);
  const TeamPart part(n, head, kSize, place, t.blocks);
  const int64_t first_at = team * a.n - head + int64_t(part.first) * kSize, step = t.teams * a.n;  // elements
  open_team(statics, t, warps);
  const int meetings = t.ahead + 1;

  if (warp == warps) {
    if (lane > 0) return;
    const int bytes = part.count * 16;
    RingPlace to;
    const auto statistics_of = [&](int k) {
      const int64_t row = team + int64_t(k) * t.teams;
      return make_float2(kCentred ? a.mean[row] : 0.f, a.rstd[row]);
    };
    float2 next = count > 0 ? statistics_of(0) : make_float2(0.f, 0.f);
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      if (k >= t.stages) barrier_wait(&statics.taken[to.at], to.parity ^ 1);
      statics.statistics[to.at] = next;
      uint64_t* const barrier = &statics.arrived[to.at];
      barrier_expect(barrier, bytes * given.tensors);
      const int64_t at = first_at + k * step;
      unsigned char* const stage = ring + to.at * given.tensors * t.part;
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
  if (warp == warps + 1) {
    if (!a.wants_rows()) return;
    RingPlace of;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      barrier_wait(&statics.summed[of.at], of.parity);
      const float2 sums = sum_over_warp(lane < warps ? statics.sums[of.at][lane] : make_float2(0.f, 0.f));
      if (lane == 0) post(t.mail + (team + int64_t(k) * t.teams) * t.blocks + place, sums);
      of.next(meetings);
    }
    return;
  }
  if (warp > warps) {
    if (!a.wants_rows()) return;
    const int mine = warp - warps - 2;
    RingPlace of, stage;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      if (k % kCollectors == mine) {
        float2 sums = make_float2(0.f, 0.f);
        collect(t.mail + (team + int64_t(k) * t.teams) * t.blocks, t.blocks, lane,
                [&](int, float2 posted) { sums = plus(sums, posted); });
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

  const int vector = int(threadIdx.x), column = (part.first + vector) * kSize - head;
  const bool inside = vector < part.count, whole = column >= 0 && column + kSize <= n, wants_rows = a.wants_rows();
  float weight[kSize];
  weights_of_columns<T, true>(a, inside ? column : n, weight);
  const uint64_t seed = kDrops && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  ColumnSums<kSize, kSums> columns = {};
  float x_bias[kDrops ? kSize : 1] = {};

  const auto take = [&](int stage, int tensor, float (&values)[kSize]) {
    unpack<T>(*reinterpret_cast<const uint4*>(ring + (stage * given.tensors + tensor) * t.part + vector * 16), values);
    if (!whole) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (column + i < 0 || column + i >= n) values[i] = 0.f;
      }
    }
  };
  const uint32_t wholes = __ballot_sync(kAllLanes, inside && whole);
  const int out_first = warp * kWarp + (wholes ? __ffs(int(wholes)) - 1 : 0), out_bytes = __popc(wholes) * 16;
  const auto place_of = [&](int stage, int tensor, int v) { return ring + (stage * given.tensors + tensor) * t.part + v * 16; };
  const auto put = [&](void* tensor, int64_t at, int stage, int which, const float (&values)[kSize]) {
    T* const to = static_cast<T*>(tensor) + at;
    if (whole && t.bulk) {
      *reinterpret_cast<uint4*>(place_of(stage, which, vector)) = pack<T>(values);
    } else if (whole) {
      *reinterpret_cast<uint4*>(to) = pack<T>(values);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (column + i >= 0 && column + i < n) to[i] = from_float<T>(values[i]);
      }
    }
  };
  RingPlace ahead_stage, ahead_meeting, stage, meeting;
  const auto first = [&] {
    barrier_wait(&statics.arrived[ahead_stage.at], ahead_stage.parity);
    const float2 statistics = statics.statistics[ahead_stage.at];
    float2 sums = make_float2(0.f, 0.f);
    if (inside) {
      float values[kSize], grad[kSize];
      take(ahead_stage.at, 0, values);
      take(ahead_stage.at, 1, grad);
      first_pass<kSize, kSums, kCentred>(values, grad, weight, statistics.x, statistics.y, columns, sums.x, sums.y);
    }
    if (wants_rows) {
      sums = sum_over_warp(sums);
      if (lane == 0) {
        statics.sums[ahead_meeting.at][warp] = sums;
        barrier_arrive(&statics.summed[ahead_meeting.at]);
      }
    }
    ahead_stage.next(t.stages);
    ahead_meeting.next(meetings);
  };
  const int ahead = min(t.ahead, count);
#pragma unroll 1
  for (int k = 0; k < ahead; ++k) first();
  int64_t at = first_at + int64_t(vector) * kSize;
#pragma unroll 1
  for (int k = 0; k < count; ++k, at += step) {
    if (k + ahead < count) first();
    if (wants_rows) {
      [[maybe_unused]] uint32_t kept = 0;
      if (kDrops && inside && a.dropout.seed) kept = kept_of_slots<kSize, 1>(a.dropout, seed, at, 0);
      barrier_wait(&statics.ready[meeting.at], meeting.parity);
      if (inside) {
        const float4 of_row = statics.terms[meeting.at];
        RowTerms terms;
        terms.scale = of_row.x, terms.offset = of_row.y, terms.slope = of_row.z, terms.mean = of_row.w;
        float values[kSize], grad[kSize];
        take(stage.at, 0, values);
        take(stage.at, 1, grad);
        second_pass<kSize, kCentred>(values, weight, terms, grad);
        if (given.tensors > 2) {
          take(stage.at, 2, values);
#pragma unroll
          for (int i = 0; i < kSize; ++i) grad[i] += values[i];
        }
        if (a.grad_x) put(a.grad_x, at, stage.at, 0, grad);
        if constexpr (kDrops) {
          if (a.dropout.seed) {
#pragma unroll
            for (int i = 0; i < kSize; ++i) grad[i] *= kept >> i & 1 ? a.dropout.scale : 0.f;
          }
          if (a.grad_dropped) put(a.grad_dropped, at, stage.at, 1, grad);
#pragma unroll
          for (int i = 0; i < kSize; ++i) x_bias[i] += grad[i];
        }
      }
    }
    if (t.bulk) show_to_copies();
    __syncwarp();
    if (lane == 0) {
      if (t.bulk) {
        const int64_t out_at = first_at + k * step + int64_t(out_first) * kSize;
        if (out_bytes > 0) {
          if (a.grad_x) copy_out_with(static_cast<T*>(a.grad_x) + out_at, place_of(stage.at, 0, out_first), out_bytes);
          if (a.grad_dropped) {
            copy_out_with(static_cast<T*>(a.grad_dropped) + out_at, place_of(stage.at, 1, out_first), out_bytes);
          }
        }
        commit_copies_out();
        if (k > 0) {
          wait_for_all_but<1>();
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
  if (!a.partials || !inside) return;
  const auto write = [&](int kind, void* result, const auto& sums) {
    if (!result) return;
    float* const partials = a.partials + (int64_t(kind) * t.teams + team) * a.columns;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int c = column + i;
      if (c < 0 || c >= n) continue;
      if (t.teams > 1) {
        partials[c] = sums[i];
      } else if (a.fp32_weights) {
        static_cast<float*>(result)[c] = sums[i];
      } else {
        static_cast<T*>(result)[c] = from_float<T>(sums[i]);
      }
    }
  };
  write(0, a.grad_weight, columns.weight);
  if constexpr (kSums > 1) write(1, a.grad_bias, columns.bias);
  if constexpr (kDrops) write(2, a.grad_x_bias, x_bias);
#endif
}

}  // namespace fuseline
