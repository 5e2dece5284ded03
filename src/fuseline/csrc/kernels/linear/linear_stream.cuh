// Linear layers for up to 32 rows of activations: y = x W^T + bias, each warp a stream of weights.
//
// Floor: the bytes of W over the copy bandwidth; for 4096 x 12288 that is 16.7 us in int8 and 8.4 in int4 at 3.0 TB/s.
// A multiprocessor has to have 18 KB under way to reach it; 48 KB a block are. Arithmetic: in int4 a scheduler has 160 cycles
// for the 1,024 weights of a tile, and some 80 instructions to issue, 32 of them where one takes two cycles.
//
// Tiles (16 rows of W) are dealt to clusters of blocks, one or two a multiprocessor, as evenly as whole tiles go; the
// blocks of a cluster share the columns, so that x of theirs fits shared memory (one block where x is small). What a
// block has is one run of steps, tile after tile, cut evenly among its warps, wherever the cuts fall in a tile. A warp
// reads its steps from memory into registers, each asked for anew as soon as it is used: between the first step and the
// last there is no barrier and nothing to wait for but data.
//
// Weights are the A of tensor-core products, as integers, which fp16 and bf16 hold exactly; x is the B. Sums of a group
// of columns are scaled in fp32. Pieces of a tile meet in shared memory, in the order of warps, then of blocks: the same
// bits each run.
//
// What stands around the layer costs next to nothing here and a launch elsewhere: a norm over k is computed by every
// block anew while the first weights are on their way, an activation and a residual are applied to the sums. For SwiGLU
// a cluster has both of a gate and what it multiplies. The launch overlaps the end of the one before (overlap.cuh).
#pragma once

#include "linear_stream_step.cuh"
#include "linear_x.cuh"
#include "plans/linear.h"

namespace fuseline {

// What of the work this block has. Asked for again after the products: registers are short during them.
struct Share {
  int rank, first_unit, units, most_units;

  __device__ __forceinline__ Share(const LinearArguments& a, int grain) {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    const int cluster = a.splits == 1 ? block : block / a.splits;
    rank = block - cluster * a.splits;
    first_unit = (cluster * a.base + min(cluster, a.extra)) * grain;
    units = (a.base + (cluster < a.extra)) * grain;
    most_units = (a.base + (a.extra > 0)) * grain;
  }
};

#if __CUDA_ARCH__ >= 900
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif

template <class T, class Weights, int kColumnBlocks, bool kAnyGroups>
__global__ void __launch_bounds__(StreamShape<Weights, kColumnBlocks, kAnyGroups>::kThreads,
                                  StreamShape<Weights, kColumnBlocks, kAnyGroups>::kBlocks)
    linear_stream_kernel(const __grid_constant__ LinearArguments a) {
  using Shape = StreamShape<Weights, kColumnBlocks, kAnyGroups>;
  constexpr int kTiles = Shape::kTiles, kChunks = Shape::kChunks, kAhead = Shape::kAhead;
  constexpr int kWarps = Shape::kWarps, kThreads = Shape::kThreads;
  constexpr bool kPlain = Weights::kFormat == FUSELINE_WEIGHT_16;
  constexpr int kVectorBytes = kWarp * 16;
  constexpr int kStepBytes = kPlain ? kTileColumns * 2 : Shape::kVectors * kVectorBytes;  // from a step to the next
  extern __shared__ __align__(16) char shared[];
  __shared__ int cut_unit[kWarps];  // the unit that a warp begins within, or none
  __shared__ uint64_t arrived;      // x

  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int group = lane / 4, quad = lane % 4;
  const int grain = a.halves && kTiles == 1 ? 2 : 1;
  const int plane = a.m * kPitch;  // floats
  float* const planes = reinterpret_cast<float*>(shared + a.x_bytes);  // of what warps begin within a unit, then of units
  const auto scales_and_shifts = [&](const Share& share) {
    return reinterpret_cast<float2*>(planes + (kWarps + share.most_units) * kTiles * plane);
  };
  const uint32_t x_shared = uint32_t(__cvta_generic_to_shared(shared)), scales_shared = x_shared + a.x_bytes - a.scale_bytes;
  const auto feature_of = [&](const Share& share, int row) {  // of a row of this cluster; a.n where there is none
    const int place = share.first_unit * kTiles + row / kTileRows;
    return place < a.tiles ? min(tile_at(a, place) * kTileRows + row % kTileRows, a.n) : a.n;
  };

  const Share share(a, grain);
  const int slice_begin = share.rank * a.steps_a_split, slice_end = min(slice_begin + a.steps_a_split, a.steps);
  const int slice = slice_end - slice_begin, total = share.units * slice;
  const int begin = int(uint32_t(total) * warp / kWarps);
  int left = int(uint32_t(total) * (warp + 1) / kWarps) - begin;  // steps to be multiplied

  // The next step to be asked for, and where it stands: 16-byte vectors of weights, words of scales.
  int unit = int(uint32_t(begin) / uint32_t(slice)), at = begin - unit * slice;
  uint32_t from = 0, scales_from = 0;
  int next_tile = 0, next_scales = 0;  // from there to the next tile's; of 16-bit weights to row g + 8
  int load_unit = unit, load_at = slice_begin + at;
  const auto point = [&] {
    const int place = (share.first_unit + load_unit) * kTiles, tile = tile_at(a, min(place, a.tiles - 1));
    const int tile_step = kTiles == 1 ? 0 : place + 1 < a.tiles ? tile_at(a, place + 1) - tile : 0;
    if constexpr (kPlain) {
      const int row = min(tile * kTileRows + group, a.n - 1), row_vectors = int(a.weight_stride / 16);
      from = uint32_t(row) * row_vectors + load_at * (kStepBytes / 16) + quad;
      next_tile = (min(row + 8, a.n - 1) - row) * row_vectors;
    } else {
      const int tile_vectors = a.chunks * (Weights::kVectors * kWarp);
      from = uint32_t(tile) * tile_vectors + load_at * (kStepBytes / 16) + lane;
      next_tile = tile_step * tile_vectors;
    }
    if constexpr (kAnyGroups) scales_from = tile * a.groups * 8 + group, next_scales = tile_step * a.groups * 8;
  };
  Step<Shape> steps[kAhead][kTiles];
  const auto load = [&](Step<Shape>(&step)[kTiles], int ahead) {
    if (left <= ahead) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int v = 0; v < Shape::kVectors; ++v) {
        if constexpr (kPlain) {
          step[t].raw[v] = make_uint4(0, 0, 0, 0);
          const bool inside = load_at * kTileColumns + v / 2 * 32 + quad * 8 < a.k;
          if (inside) step[t].raw[v] = load_once(a.weight + (int64_t(from) + v % 2 * next_tile + v / 2 * 4) * 16);
        } else {  // past the end any integers will do: x is zero there
          const bool inside = kChunks == 1 || v == 0 || load_at * kChunks + v < a.chunks;
          const char* const tile = a.weight + (int64_t(from) + t * next_tile) * 16;
          step[t].raw[v] = load_once(tile + (inside ? v * kVectorBytes : 0));
        }
      }
      if constexpr (kAnyGroups) {
        const int of = min((load_at * 4 + quad) >> a.group_shift, a.groups - 1);
        const int64_t word = int64_t(scales_from) + t * next_scales + of * 8;
        step[t].scale = __ldg(a.scales + word);
        step[t].zero = 0x0808u;
        if (a.zeros) step[t].zero = __ldg(reinterpret_cast<const uint16_t*>(a.zeros) + word);
      }
    }
    from += kStepBytes / 16;
    if (++load_at == slice_end) {
      load_at = slice_begin, ++load_unit;
      point();
    }
  };

  if (kHopper && thread == 0) {
    barrier_init(&arrived, 1);
    publish_barriers();
  }
  __syncwarp();  // the barrier is there for all lanes that have copies arrive at it
  if (left > 0) point();
  // Asks the L2 for steps of this warp, one a lane: what HBM does while the block gets ready is not waited for later.
  const auto prefetch = [&](int first, int last) {
    if (lane < first || lane >= min(last, left)) return;
    if constexpr (!kPlain) {
      const int of = begin + lane, place = (share.first_unit + of / slice) * kTiles, step = slice_begin + of % slice;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int64_t tile = tile_at(a, min(place + t, a.tiles - 1));
        prefetch_to_l2(a.weight + (tile * a.chunks + step * kChunks) * (Weights::kVectors * kVectorBytes),
                       min(kChunks, a.chunks - step * kChunks) * (Weights::kVectors * kVectorBytes));
      }
    }
  };
  if (!a.overlap) {
    prefetch_norm<kThreads>(a);
    prefetch(0, kAhead);
    if constexpr (Shape::kStagesScales) {
      for (int of = thread; of < share.units * kTiles; of += kThreads) {
        const int64_t tile = tile_at(a, min(share.first_unit * kTiles + of, a.tiles - 1));
        const int group = slice_begin >> (a.group_shift - 2), groups = min(a.groups_a_slice, a.groups - group);
        prefetch_to_l2(a.scales + (tile * a.groups + group) * 8, groups * 32);
      }
    } else if constexpr (Weights::kFormat == FUSELINE_WEIGHT_INT8) {
      for (int of = thread; of < share.units * kTiles; of += kThreads) {
        const int row = tile_at(a, min(share.first_unit * kTiles + of, a.tiles - 1)) * kTileRows;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(a.scales + row));
      }
    }
  }
  const bool copied = kHopper && a.norm == FUSELINE_NORM_NONE && a.x_vectors;
  const int x_chunks = a.steps_a_split * kChunks, x_limit = min(slice_end * kChunks * kTileColumns, a.k);
  const auto fetch_x = [&] {
    if (copied) fetch_rows<kThreads>(a, shared, &arrived, slice_begin * kChunks, x_chunks, x_limit);
  };
  if (!a.overlap) {
    wait_for_earlier();
    fetch_x();
  }
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load(steps[u], u);
  // Scales of int4: [tile][group][8 words], of the groups that the slice touches; two words of 16 bytes a group.
  const int group_begin = slice_begin >> (Shape::kStagesScales ? a.group_shift - 2 : 0);
  if constexpr (Shape::kStagesScales) {
    const int a_tile = a.groups_a_slice * 2;
    for (int i = thread; i < share.units * kTiles * a_tile; i += kThreads) {
      const int of = i / a_tile, vector = i - of * a_tile, place = share.first_unit * kTiles + of;
      const int group = min(group_begin + vector / 2, a.groups - 1);
      const int64_t from = (int64_t(tile_at(a, min(place, a.tiles - 1))) * a.groups + group) * 8 + vector % 2 * 4;
      copy_async(scales_shared + i * 16, a.scales + from);
    }
    commit_copies();
  }
  if (a.overlap) {
    prefetch_norm<kThreads>(a);  // behind the weights: whatever stands before these, HBM waits for
    wait_for_earlier();
    fetch_x();
  }
  let_next_start();
  prefetch(kAhead, a.prefetched);

  // One row's residual comes now and counts as a bias: at the end it would be waited for.
  const bool shifted = a.residual && a.m == 1 && a.activation == FUSELINE_ACTIVATION_NONE;
  for (int row = thread; row < share.units * kTiles * kTileRows; row += kThreads) {
    const int feature = feature_of(share, row);
    if (feature >= a.n) continue;
    const float scale = Weights::kFormat == FUSELINE_WEIGHT_INT8 ? __uint_as_float(__ldg(a.scales + feature)) : 1.f;
    const float bias = a.bias ? to_float(reinterpret_cast<const T*>(a.bias)[feature]) : 0.f;
    const float residual = shifted ? to_float(reinterpret_cast<const T*>(a.residual)[feature]) : 0.f;
    scales_and_shifts(share)[row] = make_float2(scale, bias + residual);
  }
  if (lane == 0) cut_unit[warp] = left > 0 && at > 0 ? unit : -1;
  const int pitch = x_pitch(a.steps_a_split * kChunks);
  if (a.norm != FUSELINE_NORM_NONE) {
    const StretchOfRows<kThreads> stretch(x_shared, a.m, slice_begin * kChunks, x_chunks, x_limit);
    load_normed_rows<T>(a, planes, stretch);
  } else if (!copied) {
    load_rows<kThreads>(a, x_shared, slice_begin * kChunks, x_chunks, x_limit);
  }
  if constexpr (Shape::kStagesScales) wait_for_copies<0>();
  __syncthreads();
  if (copied) barrier_wait(&arrived, 0);

  float sums[kTiles][kColumnBlocks][4] = {};
  uint32_t x_at[kColumnBlocks];  // rows past the last read the last one's x, and nobody their sums
#pragma unroll
  for (int c = 0; c < kColumnBlocks; ++c) x_at[c] = x_shared + min(c * 8 + group, a.m - 1) * pitch + quad * 16;
  int slot = at > 0 ? warp : kWarps + unit;
  const int scale_shift_of = a.group_shift - 2, next_scale = a.groups_a_slice * 32;
  const auto scales_of = [&](int at) {  // of this lane's rows, for a step of the slice
    return scales_shared + unit * kTiles * next_scale + (((slice_begin + at) >> scale_shift_of) - group_begin) * 32 + group * 4;
  };
  const auto put_down = [&] {
    float* const to = planes + slot * kTiles * plane;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = c * 8 + quad * 2 + i % 2;
          if (column < a.m) to[t * plane + column * kPitch + group + i / 2 * 8] = sums[t][c][i];
          sums[t][c][i] = 0.f;
        }
      }
    }
    slot = kWarps + ++unit;
    at = 0;
  };
  for (; left > 0; left -= kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (u >= left) break;
      multiply_step<T, Weights, kColumnBlocks, kAnyGroups>(
          a, steps[u], x_at, at * (kChunks * kTileColumns * 2), scales_of(at), next_scale, sums);
      load(steps[u], u + kAhead);
      if (++at == slice) put_down();
    }
  }
  if constexpr (kColumnBlocks == 1) prefetch_next(a);
  if (at > 0) put_down();  // of a warp with nothing to do nobody reads it
  __syncthreads();

  const Share mine(a, grain);
  const int rows_here = mine.units * kTiles * kTileRows;
  const float* const of_units = planes + kWarps * kTiles * plane;
  const float2* const scale_shift = scales_and_shifts(mine);

  const auto whole = [&](int row, int column) {  // of all warps
    const int tile = row / kTileRows, place = column * kPitch + row % kTileRows;
    float sum = of_units[tile * plane + place];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      if (cut_unit[w] == tile / kTiles) sum += planes[(w * kTiles + tile % kTiles) * plane + place];
    }
    return sum;
  };
  const int count = rows_here * a.m;
  if (a.splits > 1) {
    for (int i = thread; i < count; i += kThreads) {
      const int column = i / rows_here, row = i - column * rows_here;
      planes[kWarps * kTiles * plane + row / kTileRows * plane + column * kPitch + row % kTileRows] = whole(row, column);
    }
    cluster_arrive();
    cluster_wait();
  }
  for (int i = mine.rank * kThreads + thread; i < count; i += a.splits * kThreads) {
    const int column = a.m == 1 ? 0 : i / rows_here, row = i - column * rows_here, feature = feature_of(mine, row);
    if (feature >= a.n || (a.halves && row / kTileRows % 2)) continue;
    const auto sum_at = [&](int of) {
      if (a.splits == 1) return whole(of, column);
      const float* const here = of_units + of / kTileRows * plane + column * kPitch + of % kTileRows;
      float sum = 0.f;
      for (int s = 0; s < a.splits; ++s) sum += load_in_cluster(here, s);
      return sum;
    };
    const int64_t to = int64_t(column) * (a.halves ? a.n / 2 : a.n) + feature;
    const bool added = a.residual && !(a.m == 1 && a.activation == FUSELINE_ACTIVATION_NONE);
    const float residual = added ? to_float(reinterpret_cast<const T*>(a.residual)[to]) : 0.f;
    const float2 own = scale_shift[row];
    float other = 0.f;
    if (a.halves) {
      const float2 its = scale_shift[row + kTileRows];
      other = fmaf(sum_at(row + kTileRows), its.x, its.y);
    }
    const float y = activated<T>(a, fmaf(sum_at(row), own.x, own.y), other);
    reinterpret_cast<T*>(a.y)[to] = from_float<T>(y + residual);
  }
  if (a.splits > 1) {  // nobody leaves while others of the cluster read here
    cluster_arrive();
    cluster_wait();
  }
}

// ---- host ----

template <class T, class Weights, bool kAnyGroups>
auto stream_kernel_of(int column_blocks) {
  return column_blocks == 1   ? linear_stream_kernel<T, Weights, 1, kAnyGroups>
         : column_blocks == 2 ? linear_stream_kernel<T, Weights, 2, kAnyGroups>
                              : linear_stream_kernel<T, Weights, 4, kAnyGroups>;
}

template <class Weights, bool kAnyGroups>
auto stream_kernel_of(const LinearPlan& plan, bool bf16) {
  return bf16 ? stream_kernel_of<__nv_bfloat16, Weights, kAnyGroups>(plan.column_blocks)
              : stream_kernel_of<__half, Weights, kAnyGroups>(plan.column_blocks);
}

}  // namespace fuseline
