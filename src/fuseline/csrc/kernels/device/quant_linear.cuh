// Linear layers for few rows of activations (m): y = x W^T + bias, W read once from HBM.
//
// Floor: the bytes of W (n k, n k / 2 or 2 n k) over the copy bandwidth; for 4096 x 12288 that is 16.7 us in int8, 8.4 in
// int4, 33.5 in 16 bits at 3.0 TB/s. To keep HBM busy over its latency of 0.8 us, 2.4 MB have to be under way: 18 KB a
// multiprocessor at the least, and 64 KB and more are asked for here. Arithmetic: a multiprocessor receives 13 bytes a
// cycle, which for int4 leaves 4.8 instructions a lane for each weight, and one product of 16 x 8 x 16 every 9.6
// cycles, where the tensor cores do one in 1.6: m up to 32 is free, at 64 int4 is bound by them.
//
// Weights are the A of the products, in tiles of 16 rows by 64 columns; activations are B, 8 rows of x to a block of
// columns of the product. A block of 8 warps takes some tiles of rows and a stretch of columns: `row_warps` of its
// warps have rows apart, the others share rows and take turns along the columns. Every lane copies the very bytes it
// will multiply into a ring in shared memory of its own, several tiles ahead, so that weights need no barrier at all.
// x comes through shared memory in passes that the block shares, one barrier a pass.
// Where n is small the blocks of a cluster (sm_90) share the columns of a row. Sums are added up in a fixed order:
// steps along a warp's columns, then the warps, then the blocks.
//
// Weights enter the products as integers, which fp16 and bf16 hold exactly; a group's scale multiplies its sum.
//
// What stands around the layer costs next to nothing here and a launch elsewhere. A norm over k is computed by every
// block anew, while the first weights are on their way; x is read from L2. An activation and a residual are applied to
// the sums. For SwiGLU tiles of the gate and of what it multiplies lie next to each other in a block. The launch
// overlaps the end of the one before (overlap.cuh): weights are asked for before its results are waited for.
#pragma once

#include "activation.cuh"
#include "launch.cuh"
#include "overlap.cuh"
#include "quant_copies.cuh"
#include "quant_weights.cuh"

namespace fuseline {

constexpr int kLinearThreads = 256;
constexpr int kLinearWarps = kLinearThreads / kWarp;
constexpr int kMostSplits = kMaxCluster;

struct LinearArguments {
  const char* x;
  const char* weight;
  const void* scales;
  const uint16_t* zeros;  // of rows g and g + 8
  const char* bias;
  char* y;
  int64_t x_stride, weight_stride;  // bytes
  int m, n, k;
  int tiles, chunks;  // of n by 16 and of k by 64, rounded up
  int groups, group_shift;  // a group is 32 << group_shift columns
  int row_warps, splits;
  int chunks_a_split;
  int stages_a_pass, stages;  // turns that a warp takes
  int buffers;                // of x: one if there is one pass
  int ring_bytes, pass_bytes;
  bool x_vectors;  // rows of x start at multiples of 16 bytes and are so many long
  int norm;        // a fuseline_linear_norm
  const char* norm_weight;
  const char* norm_bias;
  float eps;
  int activation;  // a fuseline_linear_activation
  int halves;      // SwiGLU: tiles from a gate's to the other's, 0 without
  const char* residual;
};

// The tile of W that stands at `place` among those of all blocks: gates and what they multiply take turns.
__device__ __forceinline__ int tile_at(const LinearArguments& a, int place) {
  return a.halves ? place / 2 + place % 2 * a.halves : place;
}

// How much a block of one kind holds.
template <class Weights, int kColumnBlocks>
struct LinearShape {
  // 16 rows more a warp halve what it reads of x, and cost registers.
  static constexpr int kTiles = (Weights::kFormat == FUSELINE_WEIGHT_INT4 && kColumnBlocks >= 4) ||
                                        (Weights::kFormat == FUSELINE_WEIGHT_INT8 && kColumnBlocks >= 8)
                                    ? 2
                                    : 1;
  static constexpr int kStageVectors = kTiles * Weights::kVectors;
  // Tiles under way: 128 to 256 bytes a thread.
  static constexpr int kStages = kStageVectors == 4 ? 4 : kStageVectors == 2 && kTiles == 1 ? 6 : 8;
  static constexpr int kBlocks = kColumnBlocks == 1 ? 3 : kTiles == 1 && kColumnBlocks <= 4 ? 2 : 1;  // a multiprocessor holds
};

// Of a chunk: the scales of rows g and g + 8 for each half, and the four zero points.
template <int kTiles>
struct GroupScales {
  uint32_t scale[kTiles][2];
  uint32_t zeros[kTiles];
};

template <class T, class Weights, int kColumnBlocks>
__global__ void __launch_bounds__(kLinearThreads, LinearShape<Weights, kColumnBlocks>::kBlocks)
    quant_linear_kernel(const LinearArguments a) {
  using Shape = LinearShape<Weights, kColumnBlocks>;
  constexpr int kTiles = Shape::kTiles, kVectors = Weights::kVectors, kStages = Shape::kStages;
  constexpr bool kPlain = Weights::kFormat == FUSELINE_WEIGHT_16;
  constexpr int kSlot = kLinearThreads * 16;
  extern __shared__ __align__(16) char shared[];
  __shared__ float warp_sums[kLinearWarps];
  __shared__ float2 mean_rstd[8 * kColumnBlocks];

  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int group = lane / 4, quad = lane % 4;
  const int row_warp = warp % a.row_warps, depth_warp = warp / a.row_warps, depth_warps = kLinearWarps / a.row_warps;
  const int row_block = int(blockIdx.x) / a.splits, split = int(blockIdx.x) % a.splits;
  const int first_column = int(blockIdx.y) * 8 * kColumnBlocks;
  const int columns = min(a.m - first_column, 8 * kColumnBlocks);
  const int first_tile = (row_block * a.row_warps + row_warp) * kTiles;
  const int begin = split * a.chunks_a_split, end = min(begin + a.chunks_a_split, a.chunks);

  const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared));
  const uint32_t passes = ring + a.ring_bytes;
  const char* const x = a.x + first_column * a.x_stride;

  // Weights: where this lane's next chunk stands, for each tile.
  const char* from;
  int64_t next_tile = 0, below = 0;  // to the next row of tiles, and to row g + 8
  static_assert(kTiles == 1 || (kTiles == 2 && !kPlain));
  if constexpr (kPlain) {
    const int row = min(tile_at(a, first_tile) * kTileRows + group, a.n - 1);  // what is past the end is read for nothing
    from = a.weight + row * a.weight_stride + int64_t(begin + depth_warp) * kTileColumns * 2 + quad * 16;
    below = (min(row + 8, a.n - 1) - row) * a.weight_stride;
  } else {
    const int64_t row_bytes = int64_t(a.chunks) * (kVectors * kWarp * 16);
    const int tile = tile_at(a, min(first_tile, a.tiles - 1));
    from = a.weight + tile * row_bytes + (begin + depth_warp) * (kVectors * kWarp * 16) + lane * 16;
    next_tile = a.halves ? a.halves * row_bytes : tile < a.tiles - 1 ? row_bytes : 0;
  }
  const int step_bytes = depth_warps * (kPlain ? kTileColumns * 2 : kVectors * kWarp * 16);

  // x of the pass that starts at chunk `first`, 16 bytes (8 columns of k) at a time: [half chunk][row of x][quad].
  const auto fetch_x = [&](int pass) {
    const int first = begin + pass * a.stages_a_pass * depth_warps;
    const int vectors = 2 * min(a.stages_a_pass * depth_warps, end - first) * columns * 4;
    const uint32_t to = passes + (pass & (a.buffers - 1)) * a.pass_bytes;
    for (int i = thread; i < vectors; i += kLinearThreads) {
      const int row = (i / 4) % columns, half = i / 4 / columns;
      const int column = first * kTileColumns + half * 32 + (i % 4) * 8;
      const char* const at = x + row * a.x_stride + int64_t(column) * 2;
      if (a.x_vectors) {
        copy_async(to + i * 16, column < a.k ? at : x, column < a.k ? 16 : 0);
      } else {
        uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (column + e < a.k) words[e / 2] |= uint32_t(reinterpret_cast<const uint16_t*>(at)[e]) << (16 * (e % 2));
        }
        store_shared(to + i * 16, make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
  };

  int to_fetch = 0, fetch_step = 0, fetch_pass = 0, fetch_slot = 0;
  const auto fetch = [&] {
    if (to_fetch < a.stages) {
      if (fetch_step == 0 && fetch_pass > 0) fetch_x(fetch_pass);
      const int chunk = begin + to_fetch * depth_warps + depth_warp;
      if (chunk < end) {
        const uint32_t to = ring + (fetch_slot * Shape::kStageVectors * kLinearThreads + thread) * 16;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            const uint32_t place = to + (t * kVectors + v) * kSlot;
            if constexpr (kPlain) {
              const bool inside = chunk * kTileColumns + v / 2 * 32 + quad * 8 < a.k;
              copy_async(place, inside ? from + v % 2 * below + v / 2 * 64 : a.weight, inside ? 16 : 0);
            } else {
              copy_async(place, from + t * next_tile + v * (kWarp * 16));
            }
          }
        }
        from += step_bytes;
      }
    }
    commit_copies();
    ++to_fetch;
    if (++fetch_step == a.stages_a_pass) fetch_step = 0, ++fetch_pass;
    if (++fetch_slot == kStages) fetch_slot = 0;
  };

  const auto load_scales = [&](GroupScales<kTiles>& scales, int chunk) {
    if (chunk >= end) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int tile = tile_at(a, min(first_tile + t, a.tiles - 1));
      const int last = a.groups - 1, one = min(2 * chunk >> a.group_shift, last);
      const int64_t place = (int64_t(tile) * a.groups + one) * 8 + group;
      const uint32_t* const from_scales = static_cast<const uint32_t*>(a.scales) + place;
      scales.scale[t][0] = __ldg(from_scales);
      scales.zeros[t] = a.zeros ? uint32_t(__ldg(a.zeros + place)) * 0x10001u : 0x08080808u;
      if (a.group_shift == 0) {
        const int other = min(one + 1, last) - one;
        scales.scale[t][1] = __ldg(from_scales + other * 8);
        if (a.zeros) scales.zeros[t] = __byte_perm(scales.zeros[t], __ldg(a.zeros + place + other * 8), 0x5410);
      } else {
        scales.scale[t][1] = scales.scale[t][0];
      }
    }
  };

  float sums[kTiles][kColumnBlocks][4] = {};
  [[maybe_unused]] GroupScales<kTiles> next;
  if constexpr (Weights::kGrouped) load_scales(next, begin + depth_warp);
#pragma unroll
  for (int i = 0; i < kStages; ++i) fetch();

  wait_for_earlier();
  let_next_start();
  if (a.norm == FUSELINE_NORM_NONE) {
    // The first pass of x goes through registers: the copies under way are weights.
    const int vectors = 2 * min(a.stages_a_pass * depth_warps, end - begin) * columns * 4;
    constexpr int kTogether = 4;
    for (int first = thread; first < vectors; first += kTogether * kLinearThreads) {
      uint4 raw[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int i = first + u * kLinearThreads, row = (i / 4) % columns;
        const int column = begin * kTileColumns + i / 4 / columns * 32 + (i % 4) * 8;
        raw[u] = make_uint4(0, 0, 0, 0);
        if (i >= vectors || column >= a.k) continue;
        const char* const at = x + row * a.x_stride + int64_t(column) * 2;
        if (a.x_vectors) {
          raw[u] = *reinterpret_cast<const uint4*>(at);
        } else {
          uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (column + e < a.k) words[e / 2] |= uint32_t(reinterpret_cast<const uint16_t*>(at)[e]) << (16 * (e % 2));
          }
          raw[u] = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int i = first + u * kLinearThreads;
        if (i < vectors) store_shared(passes + i * 16, raw[u]);
      }
    }
  } else {
    const auto sum_of_block = [&](float value) {
#pragma unroll
      for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
      __syncthreads();
      if (lane == 0) warp_sums[warp] = value;
      __syncthreads();
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kLinearWarps; ++w) sum += warp_sums[w];
      return sum;
    };
    for (int row = 0; row < columns; ++row) {
      const char* const at = x + row * a.x_stride;
      float mean = 0.f;
      if (a.norm == FUSELINE_NORM_LAYER) {
        float sum = 0.f;
        for (int i = thread; i < a.k / 8; i += kLinearThreads) {
          float values[8];
          unpack<T>(*reinterpret_cast<const uint4*>(at + i * 16), values);
#pragma unroll
          for (int e = 0; e < 8; ++e) sum += values[e];
        }
        mean = sum_of_block(sum) / a.k;
      }
      float squares = 0.f;
      for (int i = thread; i < a.k / 8; i += kLinearThreads) {
        float values[8];
        unpack<T>(*reinterpret_cast<const uint4*>(at + i * 16), values);
#pragma unroll
        for (int e = 0; e < 8; ++e) squares = fmaf(values[e] - mean, values[e] - mean, squares);
      }
      squares = sum_of_block(squares);
      if (thread == 0) mean_rstd[row] = make_float2(mean, rsqrtf(squares / a.k + a.eps));
    }
    __syncthreads();
    const int vectors = 2 * min(a.stages_a_pass * depth_warps, end - begin) * columns * 4;
    for (int i = thread; i < vectors; i += kLinearThreads) {
      const int row = (i / 4) % columns;
      const int column = begin * kTileColumns + i / 4 / columns * 32 + (i % 4) * 8;
      uint4 raw = make_uint4(0, 0, 0, 0);
      if (column < a.k) {
        float values[8], weight[8], shift[8] = {};
        unpack<T>(*reinterpret_cast<const uint4*>(x + row * a.x_stride + int64_t(column) * 2), values);
        unpack<T>(__ldg(reinterpret_cast<const uint4*>(a.norm_weight + int64_t(column) * 2)), weight);
        if (a.norm_bias) unpack<T>(__ldg(reinterpret_cast<const uint4*>(a.norm_bias + int64_t(column) * 2)), shift);
        const float2 of = mean_rstd[row];
#pragma unroll
        for (int e = 0; e < 8; ++e) values[e] = fmaf((values[e] - of.x) * of.y, weight[e], shift[e]);
        raw = pack<T>(values);
      }
      store_shared(passes + i * 16, raw);
    }
  }

  int step = 0, pass = 0, slot = 0;
  for (int stage = 0; stage < a.stages; ++stage) {
    wait_for_copies<kStages - 1>();
    if (step == 0) __syncthreads();
    const int chunk = begin + stage * depth_warps + depth_warp;
    [[maybe_unused]] const GroupScales<kTiles> scales = next;
    if constexpr (Weights::kGrouped) load_scales(next, chunk + depth_warps);
    if (chunk < end) {
      const uint32_t mine = ring + (slot * Shape::kStageVectors * kLinearThreads + thread) * 16;
      const int half_bytes = columns * 64;
      const uint32_t x_at = passes + (pass & (a.buffers - 1)) * a.pass_bytes +
                            2 * (step * depth_warps + depth_warp) * half_bytes + lane * 16;
      float part[kTiles][kColumnBlocks][4];
      uint4 raw[kTiles];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t w[kTiles][2][4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint32_t place = mine + t * kVectors * kSlot;
          if constexpr (kPlain) {
            const uint4 above = load_shared(place + 2 * half * kSlot), below = load_shared(place + (2 * half + 1) * kSlot);
            w[t][0][0] = above.x, w[t][0][1] = below.x, w[t][0][2] = above.y, w[t][0][3] = below.y;
            w[t][1][0] = above.z, w[t][1][1] = below.z, w[t][1][2] = above.w, w[t][1][3] = below.w;
          } else if constexpr (Weights::kFormat == FUSELINE_WEIGHT_INT8) {
            raw[t] = load_shared(place + half * kSlot);
            Weights::template step<T>(w[t][0], raw[t].x, raw[t].y);
            Weights::template step<T>(w[t][1], raw[t].z, raw[t].w);
          } else {
            if (half == 0) raw[t] = load_shared(place);
            const uint32_t zero[2] = {kIntegers<T> | __byte_perm(scales.zeros[t], 0, half == 0 ? 0x4040 : 0x4242),
                                      kIntegers<T> | __byte_perm(scales.zeros[t], 0, half == 0 ? 0x4141 : 0x4343)};
            Weights::template step<T>(w[t][0], half == 0 ? raw[t].x : raw[t].z, zero);
            Weights::template step<T>(w[t][1], half == 0 ? raw[t].y : raw[t].w, zero);
          }
        }
#pragma unroll
        for (int c = 0; c < kColumnBlocks; ++c) {
          const uint4 b = c * 8 + group < columns ? load_shared(x_at + half * half_bytes + c * 512)
                                                  : make_uint4(0, 0, 0, 0);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            if constexpr (Weights::kGrouped) {
              if (half == 0 || a.group_shift == 0) {
#pragma unroll
                for (int i = 0; i < 4; ++i) part[t][c][i] = 0;
              }
              mma_16816<T>(part[t][c], w[t][0], b.x, b.y);
              mma_16816<T>(part[t][c], w[t][1], b.z, b.w);
            } else {
              mma_16816<T>(sums[t][c], w[t][0], b.x, b.y);
              mma_16816<T>(sums[t][c], w[t][1], b.z, b.w);
            }
          }
        }
        if constexpr (Weights::kGrouped) {
          if (half == 1 || a.group_shift == 0) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
              const float2 scale = unpack_pair<__nv_bfloat16>(scales.scale[t][half]);
#pragma unroll
              for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  sums[t][c][i] = fmaf(i < 2 ? scale.x : scale.y, part[t][c][i], sums[t][c][i]);
                }
              }
            }
          }
        }
      }
    }
    fetch();
    if (++step == a.stages_a_pass) step = 0, ++pass;
    if (++slot == kStages) slot = 0;
  }

  // The sums of all warps, [depth_warp][row of x][row of W]; four floats between rows of x keep the banks apart.
  wait_for_copies<0>();
  __syncthreads();
  float* const planes = reinterpret_cast<float*>(shared);
  const int rows = a.row_warps * kTiles * kTileRows, row_bits = 31 - __clz(rows), pitch = rows + 4;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = c * 8 + quad * 2 + i % 2, row = (row_warp * kTiles + t) * kTileRows + group + i / 2 * 8;
        if (column < columns) planes[(depth_warp * columns + column) * pitch + row] = sums[t][c][i];
      }
    }
  }
  __syncthreads();

  const int count = columns << row_bits, plane = columns * pitch;
  if (a.splits > 1 && depth_warps > 1) {
    for (int i = thread; i < count; i += kLinearThreads) {
      const int place = (i >> row_bits) * pitch + (i & (rows - 1));
      float sum = planes[place];
      for (int d = 1; d < depth_warps; ++d) sum += planes[d * plane + place];
      planes[place] = sum;
    }
  }
  if (a.splits > 1) {
    cluster_arrive();
    cluster_wait();
  }
  for (int i = split * kLinearThreads + thread; i < count; i += a.splits * kLinearThreads) {
    const int column = i >> row_bits, row = i & (rows - 1);
    const int tile = row_block * (rows / kTileRows) + row / kTileRows;
    const int feature = tile_at(a, tile) * kTileRows + row % kTileRows;
    if (feature >= a.n || tile >= a.tiles || (a.halves && tile % 2)) continue;
    const auto sum_at = [&](int place, int of) {
      float sum = 0;
      if (a.splits > 1) {
        for (int s = 0; s < a.splits; ++s) sum += load_in_cluster(planes + place, s);
      } else {
        for (int d = 0; d < depth_warps; ++d) sum += planes[d * plane + place];
      }
      if constexpr (Weights::kFormat == FUSELINE_WEIGHT_INT8) sum *= __ldg(static_cast<const float*>(a.scales) + of);
      return a.bias ? sum + to_float(reinterpret_cast<const T*>(a.bias)[of]) : sum;
    };
    const int place = column * pitch + row;
    float sum = sum_at(place, feature);
    if (a.activation == FUSELINE_ACTIVATION_SWIGLU) {
      sum = Silu<T>::value(sum) * sum_at(place + kTileRows, feature + a.halves * kTileRows);
    } else if (a.activation == FUSELINE_ACTIVATION_GELU) {
      sum = GeluErf<T>::value(sum);
    } else if (a.activation == FUSELINE_ACTIVATION_GELU_TANH) {
      sum = GeluTanh<T>::value(sum);
    }
    const int64_t to = int64_t(first_column + column) * (a.halves ? a.n / 2 : a.n) + feature;
    if (a.residual) sum += to_float(reinterpret_cast<const T*>(a.residual)[to]);
    reinterpret_cast<T*>(a.y)[to] = from_float<T>(sum);
  }
  if (a.splits > 1) {  // nobody leaves while others read here
    cluster_arrive();
    cluster_wait();
  }
}

// ---- launch ----

// Fills in what follows from row_warps and splits. Answers the bytes of shared memory that a block takes.
template <class Weights, int kColumnBlocks>
int lay_out_linear(LinearArguments& a, int row_warps, int splits) {
  using Shape = LinearShape<Weights, kColumnBlocks>;
  constexpr int kOnePass = 32 * 1024, kManyPasses = 16 * 1024;
  const int columns = std::min(a.m, 8 * kColumnBlocks), depth_warps = kLinearWarps / row_warps;
  const int stage_bytes = depth_warps * columns * kTileColumns * 2;  // of x
  a.row_warps = row_warps, a.splits = splits;
  a.chunks_a_split = int(divide_up(a.chunks, splits));
  a.stages = int(divide_up(a.chunks_a_split, depth_warps));
  if (a.stages <= Shape::kStages || int64_t(a.stages) * stage_bytes <= kOnePass) {
    a.stages_a_pass = a.stages, a.buffers = 1;
  } else {  // no shorter than the ring: x of a pass is asked for while the pass before is computed
    a.stages_a_pass = std::max(Shape::kStages, kManyPasses / stage_bytes), a.buffers = 2;
  }
  a.pass_bytes = a.stages_a_pass * stage_bytes;
  a.ring_bytes = std::min(a.stages, Shape::kStages) * Shape::kStageVectors * kLinearThreads * 16;
  const int plane_bytes = depth_warps * columns * (row_warps * Shape::kTiles * kTileRows + 4) * 4;
  return std::max(a.ring_bytes + a.buffers * a.pass_bytes, plane_bytes);
}

// Chooses how many warps have rows apart and how many blocks share columns, for the least time of the busiest
// multiprocessor, counted in bytes. Answers the bytes of shared memory, 0 if what is asked for cannot be.
template <class Weights, int kColumnBlocks>
int plan_linear(LinearArguments& a, const fuseline_linear& call, const Device& device) {
  using Shape = LinearShape<Weights, kColumnBlocks>;
  constexpr int64_t kBlockBytes = 12 * 1024;  // what beginning and ending a block costs
  const int64_t columns = std::min(a.m, 8 * kColumnBlocks), over_m = divide_up(a.m, 8 * kColumnBlocks);
  const int most = std::min(device.shared_a_block, device.shared_a_processor / Shape::kBlocks - 1024);
  int64_t best = 0;
  int best_row_warps = 0, best_splits = 0;
  for (int row_warps = 1; row_warps <= kLinearWarps; row_warps *= 2) {
    if (call.row_warps && call.row_warps != row_warps) continue;
    if (a.halves && row_warps * Shape::kTiles % 2) continue;  // a block has both of a pair
    for (int splits = 1; splits <= (device.clusters ? kMostSplits : 1); splits *= 2) {
      if (call.splits && call.splits != splits) continue;
      const int64_t a_split = divide_up(a.chunks, splits), rows = row_warps * Shape::kTiles * kTileRows;
      if (splits > 1 && a_split * (splits - 1) >= a.chunks) continue;  // a block would have nothing
      const int shared = lay_out_linear<Weights, kColumnBlocks>(a, row_warps, splits);
      if (shared > device.shared_a_block) continue;
      if (a.norm && a.buffers > 1) continue;  // x is normed once, before the products
      const int64_t blocks = divide_up(a.tiles, row_warps * Shape::kTiles) * splits * over_m;
      const int64_t weights = int64_t(a.stages) * Shape::kStageVectors * kLinearThreads * 16;
      const int64_t x = a_split * columns * kTileColumns * 2, sums = columns * rows * 4 * (splits > 1 ? 2 : 1);
      int64_t cost = divide_up(blocks, device.processors) * (weights + x / 2 + sums + kBlockBytes);
      if (shared > most) cost *= 2;  // fewer blocks at a time
      if (best == 0 || cost < best) best = cost, best_row_warps = row_warps, best_splits = splits;
    }
  }
  return best == 0 ? 0 : lay_out_linear<Weights, kColumnBlocks>(a, best_row_warps, best_splits);
}

template <class T, class Weights, int kColumnBlocks>
int launch_linear(LinearArguments a, const fuseline_linear& call, const Device& device, void* stream) {
  using Shape = LinearShape<Weights, kColumnBlocks>;
  const auto kernel = quant_linear_kernel<T, Weights, kColumnBlocks>;
  const int shared = plan_linear<Weights, kColumnBlocks>(a, call, device);
  if (shared == 0) return FUSELINE_UNSUPPORTED;

  static thread_local uint64_t granted = 0;  // devices on which this kernel may have all the shared memory
  if (device.index >= 64 || !(granted >> device.index & 1)) {
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_a_block);
    if (error != cudaSuccess) return int(error);
    if (device.index < 64) granted |= uint64_t(1) << device.index;
  }
  const int64_t blocks = divide_up(a.tiles, a.row_warps * Shape::kTiles) * a.splits;
  const int64_t over_m = divide_up(a.m, 8 * kColumnBlocks);
  if (blocks > 0x7fffffff || over_m > 0xffff) return int(cudaErrorInvalidConfiguration);
  cudaLaunchAttribute attributes[2]{};
  int count = 0;
  if (call.overlap && device.clusters) attributes[count++] = overlapping();
  if (a.splits > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = unsigned(a.splits);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks), unsigned(over_m));
  config.blockDim = dim3(kLinearThreads);
  config.dynamicSmemBytes = size_t(shared);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = unsigned(count);
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, a);
  const cudaError_t last = cudaGetLastError();
  return int(launched != cudaSuccess ? launched : last);
}

template <class T, class Weights>
int launch_linear(const LinearArguments& a, const fuseline_linear& call, const Device& device, void* stream) {
  if (a.m <= 8) return launch_linear<T, Weights, 1>(a, call, device, stream);
  if (a.m <= 16) return launch_linear<T, Weights, 2>(a, call, device, stream);
  if (a.m <= 32) return launch_linear<T, Weights, 4>(a, call, device, stream);
  return launch_linear<T, Weights, 8>(a, call, device, stream);
}

// What every format's launcher does; arguments are checked by then (quant_linear.cu).
template <class Weights>
int launch_linear(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  if (call.dtype == FUSELINE_FLOAT16) return launch_linear<__half, Weights>(a, call, device, stream);
  return launch_linear<__nv_bfloat16, Weights>(a, call, device, stream);
}

int launch_linear_16(const LinearArguments& a, const fuseline_linear& call, void* stream);
int launch_linear_int8(const LinearArguments& a, const fuseline_linear& call, void* stream);
int launch_linear_int4(const LinearArguments& a, const fuseline_linear& call, void* stream);

}  // namespace fuseline
