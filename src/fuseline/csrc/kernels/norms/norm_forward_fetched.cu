// The norms' forward for long rows, which come to shared memory in bulk copies, and with blocks that end with them: the same
// results as in norm_forward_rows.cuh, for x of y's dtype, or for sum = residual + x, which is returned, too (sm_90).
//
// Moves: as there; limit: HBM bandwidth. Threads: a row belongs to a block or a cluster, each warp to a part of it. One lane
// sends for the whole part at once; the warp takes pieces as they arrive, and what it writes takes their place and leaves in
// bulk copies. Other blocks of the multiprocessor fill the time of the meeting (waiting.cuh). Weights come from the L2, which
// gives them besides the rows: two rows a block, for half of that, read the same.
#include "kept.cuh"
#include "norm_row.cuh"
#include "device/waiting.cuh"

namespace fuseline {

struct FetchedNorm {
  NormForward norm;
  int part;  // vectors of a warp's part
  bool leaves;  // the L2 before what is written
};

struct FetchedBarriers {
  uint64_t arrived[kMostThreads / kWarp][kPieces];
  uint64_t met;
};

constexpr int kMaskedThreads = 256;  // of a block that makes masks, too: registers leave room for three of them

// kLight: of weights of rows' dtype and no more warps a row than one has lanes, with registers for more blocks a
// multiprocessor.
template <class T, bool kAdded, bool kLight = false, bool kMasked = false>
__global__ void __launch_bounds__(kLight ? 256 : kMasked ? kMaskedThreads : kMostThreads,
                                  kLight ? 4 : kMasked ? 3 : 1) norm_forward_fetched(const FetchedNorm given) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint4 slots[];
  __shared__ FetchedBarriers barriers;
  constexpr int kSize = kVector<T>;
  const NormForward& a = given.norm;
  const int n = int(a.n);
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, warps = int(blockDim.x) / kWarp;
  const int blocks = a.cluster, rank = int(blockIdx.x) & (blocks - 1);
  const int place = rank * warps + warp, count = blocks * warps;  // among the warps that share the row
  const int64_t row = int64_t(blockIdx.x / unsigned(blocks));
  Part<T> part(kAdded ? a.residual : a.x, row, a.rows, a.n, place, given.part, 16);
  part.head = 0, part.opens = part.ends = false;
  T* const sum = static_cast<T*>(a.sum) + row * a.n;
  T* const y = static_cast<T*>(a.y) + row * a.n;
  // What is normalized, of this warp, and the branch, whose place y takes.
  uint4* const mine = slots + warp * given.part;
  uint4* const branch = kAdded ? slots + (warps + warp) * given.part : mine;
  Moments* const states = reinterpret_cast<Moments*>(slots + (kAdded ? 2 : 1) * warps * given.part);
  uint64_t* const arrived = barriers.arrived[warp];

  let_next_start();
  if (lane < kPieces) barrier_init(&arrived[lane], kAdded ? 2 : 1);
  if (threadIdx.x == 0) barrier_init(&barriers.met, blocks == 1 ? warps : 1);
  publish_barriers();
  if (blocks > 1) {
    cluster_arrive_relaxed();
    __syncwarp();
  } else {
    __syncthreads();
  }
  wait_for_earlier();
  if (lane == 0) {
    part.fetch(mine, arrived, given.leaves);
    if constexpr (kAdded) {
      Part<T> other = part;
      other.at = static_cast<const T*>(a.x) + row * a.n;
      other.fetch(branch, arrived, given.leaves);
    }
  }
  // The weights of a piece, of rows' dtype; those of the first are on their way with the row. To ask for the next ones while
  // these are used reads 0.90 at 65,536 elements instead of 0.945: what a piece sends waits for them, too.
  const bool keeps = kLight || sizeof(T) == 4 || !a.fp32_weights;
  uint4 weight[kPiece], bias[kPiece];
  const auto weights_of = [&](const void* weights, int slot) {
    return __ldg(static_cast<const uint4*>(weights) + part.first + slot);
  };
  const auto take_weights = [&](int piece) {
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const int slot = piece * kPieceSlots + k * kWarp + lane;
      weight[k] = ones<T>(), bias[k] = make_uint4(0, 0, 0, 0);
      if (!keeps || slot >= part.count) continue;
      if (a.weight) weight[k] = weights_of(a.weight, slot);
      if (a.bias) bias[k] = weights_of(a.bias, slot);
    }
  };
  if constexpr (!kMasked) take_weights(0);
  [[maybe_unused]] const uint64_t seed = kMasked && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  [[maybe_unused]] const float scale = kMasked && a.dropout.seed ? a.dropout.scale : 1.f;

  const auto inverse_of = [](int count) { return kLight ? __fdividef(1.f, float(count)) : 1.f / float(count); };
  float near = 0.f;                     // the mean of the lanes' first vectors: of one alone an outlier would make it far
  float2 sums = make_float2(0.f, 0.f);  // of distances from it, and of their squares
#pragma unroll 1
  for (int piece = 0; piece * kPieceSlots < part.count; ++piece) {
    [[maybe_unused]] uint32_t kept = ~0u;
    [[maybe_unused]] uint4 x_bias[kMasked ? kPiece : 1];
    if constexpr (kMasked) {  // while the piece is on its way
      const int slot = piece * kPieceSlots + lane;
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        x_bias[k] = make_uint4(0, 0, 0, 0);
        if (!keeps || !a.x_bias || slot + k * kWarp >= part.count) continue;
        x_bias[k] = weights_of(a.x_bias, slot + k * kWarp);
      }
      if (a.dropout.seed) {
        kept = kept_of_slots<kSize, kPiece>(a.dropout, seed, row * a.n + part.element(slot), kWarp * kSize);
      }
    }
    barrier_wait(&arrived[piece], 0);
    uint4 raw[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const int slot = piece * kPieceSlots + k * kWarp + lane;
      raw[k] = slot < part.count ? mine[slot] : make_uint4(0, 0, 0, 0);
      if constexpr (kAdded) {
        if (slot >= part.count) continue;
        float values[kSize], added[kSize];
        unpack<T>(raw[k], values);
        unpack<T>(branch[slot], added);
        if constexpr (kMasked) {
          float bias[kSize];
          unpack<T>(x_bias[k], bias);
          if (!keeps && a.x_bias) load_weights<T, true>(a.x_bias, true, part.element(slot), n, bias);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            values[i] = fmaf(added[i] + bias[i], kept >> (k * kSize + i) & 1 ? scale : 0.f, values[i]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += added[i];
        }
        mine[slot] = raw[k] = pack<T>(values);
      }
    }
    if constexpr (kAdded) {
      part.send(sum, mine, piece);
    }
    if (a.centred && piece == 0) {
      float values[kSize], total = 0.f;
      unpack<T>(raw[0], values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) total += values[i];  // zeros beyond the part
      const int seen = min(part.count, kWarp) * kSize;
      near = kLight ? sum_over_warp(total) * inverse_of(max(seen, 1)) : sum_over_warp(total) / float(seen);
    }
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const int slot = piece * kPieceSlots + k * kWarp + lane;
      if (slot >= part.count) continue;
      float values[kSize];
      unpack<T>(raw[k], values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float apart = values[i] - near;
        sums.x += apart;
        sums.y = fmaf(apart, apart, sums.y);
      }
    }
  }
  if constexpr (kMasked) take_weights(0);  // whose registers the mask and its bias had
  sums = sum_over_warp(sums);
  int self = warp, own = part.count * kSize, width = n;  // and elements of this warp, and of the row
  forget(self), forget(own), forget(width);              // found anew, rather than kept
  const float inverse_n = inverse_of(width), inverse = inverse_of(max(own, 1));
  Moments* const state = states + rank * warps + self;
  const Moments moments =
      a.centred ? about_mean(near, sums, float(own), inverse) : Moments{0.f, sums.y, float(own), 0.f};
  if (blocks == 1) {
    if (lane == 0) {
      *state = moments;
      barrier_arrive(&barriers.met);
    }
  } else {
    cluster_wait();  // the others' barriers are there
    if (threadIdx.x == 0) barrier_expect(&barriers.met, count * int(sizeof(Moments)));
    if (lane < blocks) send_in_cluster(state, &barriers.met, lane, moments);
  }
  barrier_wait(&barriers.met, 0);
  const Moments all = kLight ? combine_few<kWarp>(states, count, float(n), inverse_n, a.centred)
                             : combine_near(states, count, float(n), inverse_n, a.centred);
  const float rstd = rstd_of<T>(all.squares, inverse_n, a.eps);
  const Standard<T> standard(all.mean, rstd);
  if (rank == 0 && threadIdx.x == 0) keep_statistics(a, row, all.mean, rstd);
#pragma unroll 1
  for (int piece = 0; piece * kPieceSlots < part.count; ++piece) {
    if (piece > 0) take_weights(piece);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const int slot = piece * kPieceSlots + k * kWarp + lane;
      if (slot >= part.count) continue;
      float values[kSize];
      unpack<T>(mine[slot], values);
      if (keeps) {
        float weights[kSize], biases[kSize];
        unpack<T>(weight[k], weights);
        unpack<T>(bias[k], biases);
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = fmaf(standard(values[i]), weights[i], biases[i]);
      } else {
        normalize<T, true>(a, part.element(slot), n, all.mean, rstd, values);
      }
      branch[slot] = pack<T>(values);
    }
    part.send(y, branch, piece);
  }
  if (lane == 0) wait_for_copies_out();
#endif
}

// ---- launcher ----

template <class T, bool kAdded, bool kMasked>
int launch_fetched(NormForward a, const NormForwardPlan& plan, const NormCall& call) {
  static_assert(sizeof(FetchedBarriers) == norm_forward_plans::kFetchedBarriers && sizeof(Moments) == kMomentsBytes);
  auto kernel = norm_forward_fetched<T, kAdded, false, kMasked>;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && !kAdded) {
    if (plan.light) kernel = norm_forward_fetched<T, false, true>;
  }
  int count = 0;
  if (const int error = grant(kernel, plan.shape, call, count)) return error;
  a.cluster = plan.shape.cluster;
  return launch(kernel, FetchedNorm{a, plan.part, plan.leaves}, plan.shape, call.device, call.stream);
}

int launch_norm_fetched(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  return with_dtype(call.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, __half>) {  // whose sums are held in registers
      if (a.residual && (a.x_bias || a.dropout.seed)) return launch_fetched<T, true, true>(a, plan, call);
      if (a.residual) return launch_fetched<T, true, false>(a, plan, call);
    }
    return launch_fetched<T, false, false>(a, plan, call);
  });
}

}  // namespace fuseline
