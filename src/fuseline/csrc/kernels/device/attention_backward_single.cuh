// Attention backward of plain scores, with dropout or without, in one pass (sm_90a), head dims to 64: a block of keys computes
// the scores of every tile of rows that sees it once, for all three gradients. 10 * T * S * D operations a head, where
// attention_backward.cuh does 14. What dropout keeps comes as bits, which the kernel of delta has drawn.
//
// A warpgroup multiplies. It has 128 keys, 64 at a time as the rows of its products, so that probabilities and dx are left
// operands of grad_v and grad_k as they lie with the lanes; dx goes through shared memory once, to be the left side of grad_q.
// One thread each of three more warps fetches, waits for the block's turn, and passes the turn on. The blocks of a head add to a
// tile of grad_q one after another, in fp32 and in the L2, from the last block of keys that the rows see to the first, which
// rounds the sum: bits repeat, and nothing has to be zero before. With causality a block begins with the rows that see its own
// keys last, so that a tile's turn comes as its blocks get to it. Where query heads share a key head, the sums for grad_k and
// grad_v pass from head to head in the same way. A block waits only for blocks launched before it.
//
// Limit: the latency of a step's five products and powers in one warpgroup, and the additions in the L2; two blocks share a
// multiprocessor.
#pragma once

#include "attention_backward.cuh"
#include "attention_panels.cuh"
#include "tensor_boxes.cuh"
#include "tensor_map.h"
#include "waiting.cuh"

namespace fuseline {

struct SinglePassBackward : AttentionBackward {
  CUtensorMap q, k, v, from_out;  // of what is read; from_out: of grad_out
  SinglePassScratch scratch;
  int row_tiles;
};

// The barriers of a block; those of two serve every other step.
struct SinglePassBarriers {
  uint64_t held;                    // k and v are there
  uint64_t full[2], empty[2];       // a stage is there, is read
  uint64_t turn[2];                 // this block may add to the tile of grad_q
  uint64_t stored[2], released[2];  // it has added, it has said so to the next
};

struct SinglePass {
  static constexpr int kD = 64, kRows = 64, kHalves = 2, kKeys = 64 * kHalves, kStages = 2;
  static constexpr int kMultipliers = 128, kThreads = kSinglePassThreads;
  using Keys = Panels<kD, kKeys>;
  using Rows = Panels<kD, kRows>;
  using Slopes = Panels<kRows, kKeys>;                                // dx: keys down, rows along
  static constexpr int kStatistics = 2 * kRows * int(sizeof(float));  // bytes of a stage
  static constexpr int kStage = 2 * Rows::kBytes;
  static constexpr int kAtStages = 2 * Keys::kBytes, kAtSlopes = kAtStages + kStages * kStage;
  static constexpr int kAtStatistics = kAtSlopes + Slopes::kBytes, kAtKept = kAtStatistics + kStages * kStatistics;
  static constexpr int kAtBarriers = kAtKept + kStages * KeptBits::kBytes;
  static constexpr int kShared = kAtBarriers + int(sizeof(SinglePassBarriers));
  static_assert(kShared == kSinglePassShared);
  static constexpr int kPartial = kRows * kD, kKeyPartial = 2 * kKeys * kD;  // floats
};

namespace single_pass {

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(int* to, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void add_to(float4* to, const float (&sum)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(sum[0]), "f"(sum[1]), "f"(sum[2]),
               "f"(sum[3])
               : "memory");
#endif
}
__device__ __forceinline__ void store_matrices(uint32_t at, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

__device__ __forceinline__ void wait_for_turn(const int* turn, int wanted) {
  if (wanted > 0) {
    while (load_acquire(turn) < wanted) {
    }
  }
}

// Calls step(tile of rows, number) for all that see the block's keys.
template <class Step>
__device__ __forceinline__ void each_step(int from, int to, const Step& step) {
#pragma unroll 1
  for (int tile = from; tile < to; ++tile) step(tile, tile - from);
}

// A thread's sums and the memory that blocks add to in turn, in vectors of all threads side by side.
template <int kThreads>
__device__ __forceinline__ void read_partial(float (&sums)[8][4], const float4* from) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float4 sum = __ldcg(from + n * kThreads);
    sums[n][0] = sum.x, sums[n][1] = sum.y, sums[n][2] = sum.z, sums[n][3] = sum.w;
  }
}
template <int kThreads>
__device__ __forceinline__ void leave_partial(float4* to, const float (&sums)[8][4], bool first) {
  if (first) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      __stcg(to + n * kThreads, make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]));
    }
  } else {
#pragma unroll
    for (int n = 0; n < 8; ++n) add_to(to + n * kThreads, sums[n]);
  }
}

// Writes a warp's 16 rows of sums times `by`, rounded, in vectors that four lanes exchange.
template <class T>
__device__ __forceinline__ void store_sums(const float (&sums)[8][4], float by, T* to, int64_t stride, int rows, int head_dim) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const bool odd = lane % 2, upper = quad >= 2;
#pragma unroll
  for (int first = 0; first < 8; first += 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) words[t] = pack_pair<T>(sums[first + t][2 * half] * by, sums[first + t][2 * half + 1] * by);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(kAllLanes, odd ? words[i] : words[i + 1], 1);
        words[i] = odd ? got : words[i], words[i + 1] = odd ? words[i + 1] : got;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? words[i] : words[2 + i], 2);
        words[i] = upper ? got : words[i], words[2 + i] = upper ? words[2 + i] : got;
      }
      const int row = lane / 4 + 8 * half, column = 8 * (first + quad);
      if (row < rows && column < head_dim) {
        *reinterpret_cast<uint4*>(to + row * stride + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace single_pass

template <class T, bool kDrops>
__global__ void __launch_bounds__(SinglePass::kThreads, 2)
    attention_backward_single(const __grid_constant__ SinglePassBackward g, int tiles) {
  using namespace single_pass;
  using Of = SinglePass;
  using Rows = Of::Rows;
  constexpr int kD = Of::kD;
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t base = uint32_t(__cvta_generic_to_shared(memory));
  SinglePassBarriers& barriers = *reinterpret_cast<SinglePassBarriers*>(memory + Of::kAtBarriers);
  if (threadIdx.x == 0) {
    barrier_init(&barriers.held, 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      barrier_init(barriers.full + i, 1);
      barrier_init(barriers.empty + i, Of::kMultipliers / 32);
      barrier_init(barriers.turn + i, 1);
      barrier_init(barriers.stored + i, Of::kMultipliers);
      barrier_init(barriers.released + i, 1);
    }
    publish_barriers();
  }
  __syncthreads();

  const fuseline_attention& c = g.a.call;
  const bool causal = c.causal != FUSELINE_CAUSAL_NONE;
  const Task task(tiles, int(c.heads), true);
  const int batch = task.sequence, first = task.tile * Of::kKeys, keys = int(c.seqlen_k);
  const int from = causal ? first / Of::kRows : 0, to = g.row_tiles;
  const int kv_head = task.head / g.a.group;
  // Blocks of keys that add to a tile of rows before this one.
  const auto before = [&](int tile) {
    const int last = causal ? min(tiles - 1, (tile * Of::kRows + Of::kRows - 1) / Of::kKeys) : tiles - 1;
    return last - task.tile;
  };
  const int of_rows = (batch * int(c.heads) + task.head) * to;  // the first tile's number
  const Of::Keys k_tile{base}, v_tile{base + Of::Keys::kBytes};

  if (threadIdx.x >= Of::kMultipliers) {
    give_registers<24>();
    const int warp = int(threadIdx.x - Of::kMultipliers) / 32;
    if (threadIdx.x % 32 != 0) return;
    if (warp == 0) {
      barrier_expect(&barriers.held, 2 * Of::Keys::kBytes);
      copy_box_of_four(k_tile.base, &g.k, &barriers.held, 0, first, kv_head, batch);
      copy_box_of_four(v_tile.base, &g.v, &barriers.held, 0, first, kv_head, batch);
      each_step(from, to, [&](int tile, int number) {
        const int stage = number % 2;
        if (number >= 2) barrier_wait(barriers.empty + stage, (number / 2 - 1) & 1);
        uint64_t* const full = barriers.full + stage;
        barrier_expect(full, Of::kStage + Of::kStatistics + (kDrops ? KeptBits::kBytes : 0));
        const Rows q_tile{base + Of::kAtStages + stage * Of::kStage}, grad_tile{q_tile.base + Rows::kBytes};
        copy_box_of_four(q_tile.base, &g.q, full, 0, tile * Of::kRows, task.head, batch);
        copy_box_of_four(grad_tile.base, &g.from_out, full, 0, tile * Of::kRows, task.head, batch);
        unsigned char* const statistics = memory + Of::kAtStatistics + stage * Of::kStatistics;
        const int64_t at = int64_t(of_rows + tile) * Of::kRows;
        copy_in(statistics, g.lse_log2 + at, Of::kStatistics / 2, full);
        copy_in(statistics + Of::kStatistics / 2, g.delta + at, Of::kStatistics / 2, full);
        if constexpr (kDrops) {
          copy_in(memory + Of::kAtKept + stage * KeptBits::kBytes,
                  g.scratch.kept + (int64_t(of_rows + tile) * tiles + task.tile) * KeptBits::kWords, KeptBits::kBytes, full);
        }
      });
    } else if (warp == 1) {
      each_step(from, to, [&](int tile, int number) {
        if (number >= 2) barrier_wait(barriers.released + number % 2, (number / 2 - 1) & 1);
        wait_for_turn(g.scratch.turns + of_rows + tile, before(tile));
        barrier_arrive(barriers.turn + number % 2);
      });
    } else if (warp == 2) {
      each_step(from, to, [&](int tile, int number) {
        barrier_wait(barriers.stored + number % 2, (number / 2) & 1);
        if (task.tile > 0) store_release(g.scratch.turns + of_rows + tile, before(tile) + 1);
        barrier_arrive(barriers.released + number % 2);
      });
    }
  } else {
    take_registers<232>();
    const float by = kDrops ? g.a.dropout.scale : 1.f;  // delta is divided by it, all sums are multiplied
    const Of::Slopes slopes{base + Of::kAtSlopes};
    float k_sums[Of::kHalves][1][kD / 8][4], v_sums[Of::kHalves][1][kD / 8][4];
#pragma unroll
    for (int half = 0; half < Of::kHalves; ++half) {
      set_zero(k_sums[half]);
      set_zero(v_sums[half]);
    }
    barrier_wait(&barriers.held, 0);
    // With causality the first rows see the first half of the keys alone.
    const auto multiply = [&](auto halves, int tile, int number) {
      constexpr int kHalves = decltype(halves)::value;
      const int stage = number % 2, parity = number / 2 & 1;
      const Rows q_tile{base + Of::kAtStages + stage * Of::kStage}, grad_tile{q_tile.base + Rows::kBytes};
      const int row = tile * Of::kRows;
      const int seen = causal ? min(row, keys - 1) : keys - 1;  // all rows see the keys to this one
      barrier_wait(barriers.full + stage, parity);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int key = first + 64 * half;
        float scores[1][8][4], dots[1][8][4];
        wgmma_fence();
        start_rows<T>(scores, k_tile, 64 * half, q_tile, 0);
        wgmma_commit();
        start_rows<T>(dots, v_tile, 64 * half, grad_tile, 0);
        wgmma_commit();
        wgmma_wait<1>();
        hold(scores[0]);
        const Lane at;
        if (key + 63 > seen) {
          const int mine = key + at.warp * 16 + at.lane / 4, down = mine - row - 2 * (at.lane % 4);
          each_element<1, 8>([&](int, int n, int e) {
            const bool later = causal && down + e / 2 * 8 > 8 * n + e % 2;
            if (later || mine + e / 2 * 8 >= keys) scores[0][n][e] = -kInfinity;
          });
        }
        const float* const lse =
            reinterpret_cast<const float*>(memory + Of::kAtStatistics + stage * Of::kStatistics) + 2 * (at.lane % 4);
        each_element<1, 8>([&](int, int n, int e) {
          scores[0][n][e] = power_of_two(fmaf(scores[0][n][e], g.a.scale_log2, -lse[8 * n + e % 2]));
        });
        wgmma_wait<0>();
        hold(dots[0]);
        if constexpr (kDrops) {
          const uint32_t* const kept = reinterpret_cast<const uint32_t*>(memory + Of::kAtKept + stage * KeptBits::kBytes) +
                                       half * KeptBits::kHalf + at.warp * 8 + at.lane % 4;
#pragma unroll
          for (int strip = 0; strip < Of::kRows / 16; ++strip) {
            const uint32_t words[2] = {kept[strip * KeptBits::kStrip] >> at.lane / 4,
                                       kept[strip * KeptBits::kStrip + 4] >> at.lane / 4};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const int n = 2 * strip + i / 4, e = i % 4;
              const float power = scores[0][n][e];
              scores[0][n][e] = words[e / 2] & 1u << (i / 4 * 16 + e % 2 * 8) ? power : 0.f;
              dots[0][n][e] = fmaf(scores[0][n][e], dots[0][n][e], -power * lse[Of::kRows + 8 * n + e % 2]);
            }
          }
        } else {
          each_element<1, 8>([&](int, int n, int e) {
            dots[0][n][e] = scores[0][n][e] * (dots[0][n][e] - lse[Of::kRows + 8 * n + e % 2]);
          });
        }
        uint32_t left[2][4][4];
        pack_left<T>(left[0], scores);
        pack_left<T>(left[1], dots);
        if (half == 0) meet();  // the products of the step before have read the slopes
        const uint32_t line = slopes.chunk(64 * half + at.warp * 16 + at.lane % 16, at.lane / 16);
#pragma unroll
        for (int k = 0; k < 4; ++k) store_matrices(Of::Slopes::chunks_on(line, 2 * k), left[1][k]);
        wgmma_fence();
        start_columns<T>(v_sums[half], left[0], grad_tile);
        start_columns<T>(k_sums[half], left[1], q_tile);
        wgmma_commit();
        if (half + 1 < kHalves) {  // registers do not hold these operands and the sums of the other half
          wgmma_wait<0>();
          hold(v_sums[half][0]);
          hold(k_sums[half][0]);
        }
      }
      show_to_products();
      meet();
      barrier_wait(barriers.turn + stage, parity);
      const bool added = before(tile) > 0, last = task.tile == 0;
      float4* const partial =
          reinterpret_cast<float4*>(g.scratch.partial + int64_t(of_rows + tile) * Of::kPartial) + threadIdx.x;
      float sums[8][4];
      if (added && last) {
        read_partial<Of::kMultipliers>(sums, partial);
      } else {
#pragma unroll
        for (int n = 0; n < 8; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.f;
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4 * kHalves; ++k) {
        wgmma_shared<T, kD, true>(sums, slopes.columns(0, k), k_tile.columns(0, k), true);
      }
      wgmma_commit();
      wgmma_wait<0>();
      hold(sums);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        hold(v_sums[half][0]);
        hold(k_sums[half][0]);
      }
      const Lane at;
      if (at.lane == 0) barrier_arrive(barriers.empty + stage);
      if (last) {
        const int first_row = row + at.warp * 16;
        store_sums(sums, g.a.scale * by,
                   static_cast<T*>(g.grad_q) + batch * g.grad_q_strides[0] + task.head * g.grad_q_strides[1] +
                       first_row * g.grad_q_strides[2],
                   g.grad_q_strides[2], int(c.seqlen_q) - first_row, int(c.head_dim));
      } else {
        leave_partial<Of::kMultipliers>(partial, sums, !added);
      }
      barrier_arrive(barriers.stored + stage);
    };
    if (causal) multiply(std::integral_constant<int, 1>{}, from, 0);
#pragma unroll 1
    for (int tile = from + causal; tile < to; ++tile) {
      multiply(std::integral_constant<int, Of::kHalves>{}, tile, tile - from);
    }
    if (g.a.group > 1) {
      const int before_this = task.head % g.a.group;  // heads of the group
      const bool last = before_this == g.a.group - 1;
      const int number = (batch * int(c.kv_heads) + kv_head) * tiles + task.tile;
      int* const turn = g.scratch.key_turns + number;
      float4* const partial =
          reinterpret_cast<float4*>(g.scratch.key_partial + int64_t(number) * Of::kKeyPartial) + threadIdx.x;
      if (threadIdx.x == 0) wait_for_turn(turn, before_this);
      meet();
      const auto pass_on = [&](float(&sums)[kD / 8][4], int which) {
        float4* const mine = partial + which * (kD / 8) * Of::kMultipliers;
        if (last) {
          float of_others[kD / 8][4];
          read_partial<Of::kMultipliers>(of_others, mine);
          each_element<1, kD / 8>([&](int, int n, int e) { sums[n][e] += of_others[n][e]; });
        } else {
          leave_partial<Of::kMultipliers>(mine, sums, before_this == 0);
        }
      };
#pragma unroll
      for (int half = 0; half < Of::kHalves; ++half) {
        pass_on(k_sums[half][0], 2 * half);
        pass_on(v_sums[half][0], 2 * half + 1);
      }
      if (!last) {
        meet();  // all have added
        if (threadIdx.x == 0) store_release(turn, before_this + 1);
        return;
      }
    }
    meet();  // all have read the stages
    const Lane at;
    T* const through = reinterpret_cast<T*>(memory + Of::kAtStages) + at.warp * 16 * kPitch<T, kD>;
#pragma unroll
    for (int half = 0; half < Of::kHalves; ++half) {
      const int warp_first = first + 64 * half + at.warp * 16;
      const auto store = [&](const float(&sums)[1][kD / 8][4], float scale, void* grad, const int64_t(&strides)[3]) {
        const float factor[1][2] = {{scale, scale}};
        store_rows<T, kD, 1>(sums, factor, through,
                             static_cast<T*>(grad) + batch * strides[0] + kv_head * strides[1] + warp_first * strides[2],
                             strides[2], keys - warp_first, int(c.head_dim));
      };
      store(k_sums[half], g.a.scale * by, g.grad_k, g.grad_k_strides);
      store(v_sums[half], by, g.grad_v, g.grad_v_strides);
    }
  }
}

}  // namespace fuseline
