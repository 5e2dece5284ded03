// The norms' forward for long rows at any address, by blocks that stay (sm_90): the same results as in norm_forward_rows.cuh, for
// x of y's dtype, or for sum = residual + dropout(x + x_bias), which is returned, too.
//
// Moves: as there. Limit: instructions, beside HBM bandwidth. Threads: a cluster has a row at a time; each warp has neighbouring
// columns, the same ones row after row, and a ring of its own of pieces of rows, which come in bulk copies with the vectors that
// they stand in. A lane has every kWarp-th column of its warp, so that no element is shifted: it reads elements from shared
// memory, holds them while the row meets, and writes them as they are. A piece's place takes another as soon as it is read.
// Weights are in shared memory, each lane's beside each other.
#pragma once

#include "kept.cuh"
#include "norm_backward_ring_parts.cuh"
#include "norm_states.cuh"

namespace fuseline {

constexpr int kStayingThreads = 512, kStayingWarps = kStayingThreads / kWarp;
constexpr int kMostStayingPieces = 16;
constexpr int kStayingColumns = 32;  // of a thread

struct StayingNorm {
  NormForward norm;
  int pieces;     // of a warp's ring
  int states_at;  // behind the ring, in bytes
  int weights_at[3];  // of weight, bias and x_bias
};

template <class T>
struct StayingKind {
  using Y = T;
  static constexpr bool kShifted = true;
  static constexpr int kSize = kVector<T>, kSlots = kStayingColumns / kSize, kTogether = 2;  // slots of a piece
  static constexpr int kPiece = kTogether * kWarp * 16 + 16;                                 // bytes of a tensor
};

struct StayingStatics {
  uint64_t arrived[kMostStayingPieces][kStayingWarps], met[2];
};

template <class T, bool kAdded, bool kMasked>
__global__ void __launch_bounds__(kStayingThreads, 1) norm_forward_pieces(const StayingNorm given) {
#if __CUDA_ARCH__ >= 900
  using Kind = StayingKind<T>;
  constexpr int kSize = Kind::kSize, kSlots = Kind::kSlots, kTogether = Kind::kTogether, kTensors = kAdded ? 2 : 1;
  constexpr int kStep = kWarp * kSize, kPieces = kSlots / kTogether, kColumns = kTogether * kStep;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ StayingStatics barriers;

  const NormForward& a = given.norm;
  const int n = int(a.n), rows = int(a.rows), pieces = given.pieces;
  const int lane = int(threadIdx.x) % kWarp, warp = of_warp(int(threadIdx.x) / kWarp), warps = int(blockDim.x) / kWarp;
  const int cluster = a.cluster, rank = int(blockIdx.x) & (cluster - 1);
  const int block = int(blockIdx.x) / cluster, blocks = int(gridDim.x) / cluster;  // a cluster counts once
  const int from = (rank * warps + warp) * kStep * kSlots, start = from + lane;
  const T* const normalized = static_cast<const T*>(kAdded ? a.residual : a.x);
  const T* const branch = kAdded ? static_cast<const T*>(a.x) : nullptr;

  const auto place = [&](int stage) { return (warp * pieces + stage) * (kTensors * Kind::kPiece); };
  const auto weights_of = [&](int which) {
    const int of_warp = kStayingColumns / (a.fp32_weights || sizeof(T) == 4 ? 4 : 8) * kWarp;
    uint4* const at = reinterpret_cast<uint4*>(ring + given.weights_at[which]) + warp * of_warp + lane;
    return RingWeights<Kind, kWarp>{at, a.fp32_weights || sizeof(T) == 4};
  };
  // One lane sends for piece number `piece` of `row`, or of rows after it.
  const auto fetch = [&](int row, int piece, int stage) {
    make_ready(piece);  // what follows is made anew, rather than kept for each piece
    row += piece / kPieces * blocks, piece %= kPieces;
    if (row >= rows) return;
    const int column = from + piece * kColumns, bytes = max(0, min(kColumns, n - column)) * int(sizeof(T));
    uint64_t* const barrier = &barriers.arrived[stage][warp];
    const int64_t at = row * a.n + column;
    const Span<T, true> span(normalized, at, bytes), other(branch, at, kAdded ? bytes : 0);
    barrier_expect(barrier, span.bytes + other.bytes);
    if (bytes == 0) return;
    copy_in(ring + place(stage), span.first, span.bytes, barrier);
    if (kAdded) copy_in(ring + place(stage) + Kind::kPiece, other.first, other.bytes, barrier);
  };

  let_next_start();
  if (lane == 0) {
#pragma unroll 1
    for (int stage = 0; stage < pieces; ++stage) barrier_init(&barriers.arrived[stage][warp], 1);
  }
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int meeting = 0; meeting < 2; ++meeting) barrier_init(&barriers.met[meeting], 1);
  }
  publish_barriers();
  cluster_arrive_relaxed();
  __syncwarp();
  wait_for_earlier();
  const uint64_t seed = kMasked && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  const float scale = kMasked && a.dropout.seed ? a.dropout.scale : 1.f;
  if (lane == 0) {
#pragma unroll 1
    for (int stage = 0; stage < pieces; ++stage) fetch(block, stage, stage);
  }
  const void* const weights[3] = {a.weight, a.bias, a.x_bias};
#pragma unroll
  for (int which = 0; which < 3; ++which) {
    if (!weights[which]) continue;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      float values[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int column = start + k * kStep + i * kWarp;
        values[i] = column < n ? weight_at<T>(weights[which], a.fp32_weights, column) : 0.f;
      }
      weights_of(which).put(k, values);
    }
  }
  cluster_wait();  // the others' barriers are there; weights are each thread's own

  const int own = max(0, min(kStep * kSlots, n - from));  // columns of this warp
  const float inverse_n = 1.f / float(n), inverse = 1.f / float(max(own, 1));
  const auto take = [&](const unsigned char* part, int head, float (&values)[kSize]) {
    const T* const elements = reinterpret_cast<const T*>(part) + head + lane;
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = to_float(elements[i * kWarp]);
  };
  const auto put = [&](T* row_of, int column, bool whole, const float (&values)[kSize]) {
    T* const to = row_of + column;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) to[i * kWarp] = from_float<T>(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (column + i * kWarp < n) to[i * kWarp] = from_float<T>(values[i]);
      }
    }
  };
  int stage = 0, parity = 0, row = block;
#pragma unroll 1
  for (int turn = 0; row < rows; ++turn, row += blocks) {
    int64_t base = row * a.n;
    forget(base);  // kept, rather than multiplied anew for each store
    const int head = elements_into_vector(normalized + base + from);
    const int branch_head = kAdded ? elements_into_vector(branch + base + from) : 0;
    // The mask is made for the fours of elements that a slot stands in, and its bits go round the warp.
    const int64_t masks_from = (base + from) / 4 * 4;
    const int mask_head = int((base + from) % 4);
    const auto masks_of = [&](int k) {
      return kept_of_slots<kSize, 1>(a.dropout, seed, masks_from + k * kStep + lane * kSize, 0);
    };
    const bool masks = kMasked && a.dropout.seed;
    [[maybe_unused]] uint32_t mask = masks ? masks_of(0) : 0;
    float values[kSlots][kSize], near = 0.f;  // the mean of the lanes' first elements
    float2 sums = make_float2(0.f, 0.f);      // of distances from it, and of their squares
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const unsigned char* const part = ring + place(stage) + k % kTogether * kWarp * 16;
      const int column = start + k * kStep;
      const bool whole = from + (k + 1) * kStep <= n;
      [[maybe_unused]] uint32_t kept = ~0u;
      if constexpr (kMasked) {
        if (masks) {
          const uint32_t next = masks_of(k + 1), beyond = __shfl_sync(kAllLanes, next, 0);
          kept = 0;
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            const int at_bit = mask_head + i * kWarp + lane;
            const uint32_t of_lane = __shfl_sync(kAllLanes, mask, at_bit / kSize);
            kept |= ((at_bit < kStep ? of_lane : beyond) >> (at_bit % kSize) & 1) << i;
          }
          mask = next;
        }
      }
      if (k % kTogether == 0) barrier_wait(&barriers.arrived[stage][warp], parity);
      if (from + k * kStep < n) {
        take(part, head, values[k]);
        if constexpr (kAdded) {
          float added[kSize];
          take(part + Kind::kPiece, branch_head, added);
          if constexpr (kMasked) {
            float x_bias[kSize] = {};
            if (a.x_bias) weights_of(2).take(k, x_bias);
#pragma unroll
            for (int i = 0; i < kSize; ++i) {
              values[k][i] = fmaf(added[i] + x_bias[i], kept >> i & 1 ? scale : 0.f, values[k][i]);
            }
          } else {
#pragma unroll
            for (int i = 0; i < kSize; ++i) values[k][i] += added[i];
          }
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[k][i] = to_float(from_float<T>(values[k][i]));
          put(static_cast<T*>(a.sum) + base, column, whole, values[k]);
        }
        if (a.centred && k == 0) {
          const bool there = column < n;
          const float2 seen = sum_over_warp(there ? make_float2(values[0][0], 1.f) : make_float2(0.f, 0.f));
          near = seen.x / seen.y;
        }
        if (!whole) {  // beyond the row stand others, or nothing
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            if (column + i * kWarp >= n) values[k][i] = near;
          }
        }
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const float apart = values[k][i] - near;
          sums.x += apart;
          sums.y = fmaf(apart, apart, sums.y);
        }
      }
      if ((k + 1) % kTogether > 0) continue;
      __syncwarp();
      if (lane == 0) fetch(row, k / kTogether + pieces, stage);
      if (++stage == pieces) stage = 0, parity ^= 1;
    }
    sums = sum_over_warp(sums);
    const Moments mine =
        a.centred ? about_mean(near, sums, float(own), inverse) : Moments{0.f, sums.y, float(own), 0.f};
    int count = warps;  // of the row
    make_ready(count);
    count *= cluster;
    Moments* const states = reinterpret_cast<Moments*>(ring + given.states_at) + (turn & 1) * count;
    uint64_t* const met = &barriers.met[turn & 1];
    if (threadIdx.x == 0) barrier_expect(met, count * int(sizeof(Moments)));
    if (lane < cluster) send_in_cluster(states + rank * warps + warp, met, lane, mine);
    barrier_wait(met, turn >> 1 & 1);
    const Moments all = combine_near(states, count, float(n), inverse_n, a.centred);
    const float rstd = rstd_of<T>(all.squares, inverse_n, a.eps);
    const Standard<T> standard(all.mean, rstd);
    if (rank == 0 && threadIdx.x == 0) keep_statistics(a, row, all.mean, rstd);
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      if (from + k * kStep >= n) continue;
      float weight[kSize], bias[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) weight[i] = 1.f, bias[i] = 0.f;
      if (a.weight) weights_of(0).take(k, weight);
      if (a.bias) weights_of(1).take(k, bias);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[k][i] = fmaf(standard(values[k][i]), weight[i], bias[i]);
      put(static_cast<T*>(a.y) + base, start + k * kStep, from + (k + 1) * kStep <= n, values[k]);
    }
  }
#endif
}

// The host's half. False for rows that it does not take.
template <class T, bool kAdded, bool kMasked>
bool run_staying(NormForward a, const Device& device, void* stream, int& error, const RowChoice* requested) {
  using Kind = StayingKind<T>;
  constexpr int kTensors = kAdded ? 2 : 1;
  constexpr int64_t kColumnsOfWarp = int64_t(kWarp) * kStayingColumns;
  for (int cluster = requested ? requested->cluster : 2; cluster <= kMostBlocks; cluster *= 2) {  // as few blocks as hold a row
    const int warps = int(divide_up(divide_up(a.n, kColumnsOfWarp), cluster));
    if (warps > kStayingWarps) continue;
    StayingNorm given{a};
    given.norm.cluster = cluster;
    const int64_t weights = warps * kColumnsOfWarp * (a.fp32_weights || sizeof(T) == 4 ? 4 : 2);
    const int64_t states = int64_t(2) * cluster * warps * int64_t(sizeof(Moments));
    const int64_t piece = int64_t(warps) * Kind::kPiece * kTensors;
    int64_t beside = states;
    for (const void* each : {a.weight, a.bias, a.x_bias}) beside += each ? weights : 0;
    const int64_t room = device.shared_a_block - int64_t(sizeof(StayingStatics)) - beside;
    given.pieces = int(std::min<int64_t>(kMostStayingPieces, room / piece));
    if (room < 2 * piece) continue;
    int at = given.states_at = int(given.pieces * piece);
    at += int(states);
    const void* const all[3] = {a.weight, a.bias, a.x_bias};
    for (int which = 0; which < 3; ++which) {
      given.weights_at[which] = at;
      at += all[which] ? int(weights) : 0;
    }
    const auto kernel = norm_forward_pieces<T, kAdded, kMasked>;
    int count = 0;
    if ((cluster > kMaxCluster &&
         cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) ||
        resident_clusters(kernel, device, warps * kWarp, size_t(at), cluster, count) != cudaSuccess || count == 0) {
      return cudaGetLastError(), false;  // it grants no such clusters
    }
    const int blocks = int(std::min<int64_t>({a.rows, count, divide_up(device.processors, cluster)}));
    error = launch(kernel, given, int64_t(blocks) * cluster, dim3(warps * kWarp), size_t(at), cluster, stream, true);
    return true;
  }
  return false;
}

}  // namespace fuseline
