// Linear layers for few rows of activations (m): y = x W^T + bias, W read once from HBM.
//
// Floor: the bytes of W (n k, n k / 2 or 2 n k) over the copy bandwidth; for 4096 x 12288 that is 16.7 us in int8, 8.4 in
// int4, 33.5 in 16 bits at 3.0 TB/s. To keep HBM busy over its latency of 0.8 us, 2.4 MB have to be under way: 18 KB a
// multiprocessor at the least, and 64 KB and more are asked for here. Arithmetic: a multiprocessor receives 13 bytes a
// cycle, which for int4 leaves 4.8 instructions a lane for each weight, and one product of 16 x 8 x 16 every 9.6
// cycles, where the tensor cores do one in 1.6: m up to 32 is free, at 64 int4 is bound by them.
//
// Weights are the A of the products, in tiles of 16 rows by 64 columns; activations are B, 8 rows of x to a block of
// columns of the product. A unit is some tiles of rows (and up to 64 rows of x) along a stretch of columns. Blocks of 8
// warps stay, as many as fit, and take unit after unit: `row_warps` of their warps have rows apart, the others share
// rows and take turns along the columns. Every lane copies the very bytes it will multiply into a ring in shared memory
// of its own, several tiles ahead and across units, so that weights need no barrier at all and HBM no pause.
// x stays in shared memory where it fits, and otherwise comes in passes that the block shares, one barrier a pass.
// Where n is small the blocks of a cluster (sm_90) share the columns of a row. Sums are added up in a fixed order:
// steps along a warp's columns, then the warps, then the blocks.
//
// A linear layer of a token takes a few microseconds, and starting a kernel costs two: the launch overlaps the end of the
// one before (overlap.cuh). Its first weights are asked for then, into the L2, or into the ring where the caller knows
// that the launch before did not write them.
//
// Weights enter the products as integers, which fp16 and bf16 hold exactly; a group's scale multiplies its sum.
//
// What stands around the layer costs next to nothing here and a launch elsewhere. A norm over k is computed by every
// block anew, while the first weights are on their way; x is read from L2. An activation and a residual are applied to
// the sums. For SwiGLU tiles of the gate and of what it multiplies lie next to each other in a block.
#pragma once

#include "linear_call.cuh"

namespace fuseline {

constexpr int kLinearThreads = 256;
constexpr int kLinearWarps = kLinearThreads / kWarp;
// How much a block of one kind holds.
template <class Weights, int kColumnBlocks>
struct LinearShape {
  // 16 rows more a warp halve what it reads of x, and cost registers.
  static constexpr int kTiles = kColumnBlocks >= 4 && Weights::kFormat != FUSELINE_WEIGHT_16 ? 2 : 1;
  // Chunks of 64 columns in one stage of the ring: what a stage costs beside its products is shared by them.
  static constexpr int kDepth = Weights::kFormat == FUSELINE_WEIGHT_INT4   ? (kColumnBlocks < 8 ? 2 : 1)
                                : Weights::kFormat == FUSELINE_WEIGHT_INT8 ? 3 - kTiles
                                                                           : 1;
  static constexpr int kWeightBytes = kTiles * kDepth * Weights::kVectors * kLinearThreads * 16;  // of a stage
  static constexpr int kGroupBytes = Weights::kGrouped ? kTiles * kLinearWarps * 256 : 0;  // scales and zero points
  static constexpr int kStageBytes = kWeightBytes + kGroupBytes;
  // A multiprocessor holds.
  static constexpr int kBlocks = kTiles == 2 || kColumnBlocks == 8                                ? 1
                                 : kColumnBlocks == 1 && Weights::kFormat == FUSELINE_WEIGHT_INT8 ? 3
                                                                                                  : 2;
  // 32 to 96 KB under way in a block; what x takes of many rows leaves no more, on an A100 of 32.
  static constexpr int kStages =
      kColumnBlocks == 4 && Weights::kGrouped                                                         ? 3
      : kColumnBlocks < 8 && (kWeightBytes < 16 * 1024 || (kColumnBlocks == 1 && kBlocks == 2)) ? 6
                                                                                                : 4;
};

// Eight elements of 16 bits, of which `there` are, and zeros.
__device__ __forceinline__ uint4 load_eight(const char* at, int there) {
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < there) words[e / 2] |= uint32_t(reinterpret_cast<const uint16_t*>(at)[e]) << (16 * (e % 2));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A stretch of x on its way into shared memory, 16 bytes (8 columns of k) at a time: [half chunk][row of x][quad]. A
// thread has one row and one quad, and zeros stand for the columns from `limit` on.
struct StretchOfX {
  int columns, row, now, step, count, first, limit;

  __device__ __forceinline__ StretchOfX(int columns_, int first_, int chunks, int limit_)
      : columns(columns_), count(2 * chunks), first(first_ * kTileColumns + int(threadIdx.x) % 4 * 8), limit(limit_) {
    const int room_bits = columns == 1 ? 0 : 32 - __clz(columns - 1);  // threads for rows, a power of two
    row = (int(threadIdx.x) / 4) & ((1 << room_bits) - 1);
    now = row < columns ? (int(threadIdx.x) / 4) >> room_bits : count;
    step = (kLinearThreads / 4) >> room_bits;
  }
  __device__ __forceinline__ int column(int at_half) const { return first + at_half * 32; }
  __device__ __forceinline__ uint32_t place(uint32_t to, int at_half) const {
    return to + (at_half * columns + row) * 64 + threadIdx.x % 4 * 16;
  }
};

// Later passes are copied while the pass before is computed; `x` is the first row of the unit's.
__device__ __forceinline__ void fetch_x(const LinearArguments& a, const char* x, uint32_t to, StretchOfX of) {
  for (; of.now < of.count; of.now += of.step) {
    const int column = of.column(of.now);
    const char* const at = x + of.row * a.x_stride + int64_t(column) * 2;
    if (a.x_vectors) {
      copy_async(of.place(to, of.now), column < of.limit ? at : a.x, column < of.limit ? 16 : 0);
    } else {
      store_shared(of.place(to, of.now), load_eight(at, of.limit - column));
    }
  }
}

// The first pass goes through registers: the copies under way are weights.
__device__ __forceinline__ void load_x(const LinearArguments& a, const char* x, uint32_t to, StretchOfX of) {
  constexpr int kTogether = 4;
  for (; of.now < of.count; of.now += kTogether * of.step) {
    uint4 raw[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int half = of.now + u * of.step, column = of.column(half);
      raw[u] = make_uint4(0, 0, 0, 0);
      if (half >= of.count || column >= of.limit) continue;
      const char* const at = x + of.row * a.x_stride + int64_t(column) * 2;
      raw[u] = a.x_vectors ? *reinterpret_cast<const uint4*>(at) : load_eight(at, of.limit - column);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int half = of.now + u * of.step;
      if (half < of.count) store_shared(of.place(to, half), raw[u]);
    }
  }
}

// The same, normed over all of k. `room` holds a float for each warp and two for each row of x.
template <class T>
__device__ __forceinline__ void norm_x(const LinearArguments& a, const char* x, uint32_t to, float* room,
                                       StretchOfX of) {
  const int thread = threadIdx.x;
  float2* const mean_rstd = reinterpret_cast<float2*>(room + kLinearWarps);
  const auto sum_of_block = [&](float value) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    __syncthreads();
    if (thread % kWarp == 0) room[thread / kWarp] = value;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kLinearWarps; ++w) sum += room[w];
    return sum;
  };
  for (int row = 0; row < of.columns; ++row) {
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
  for (; of.now < of.count; of.now += of.step) {
    const int column = of.column(of.now);
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (column < of.limit) {
      float values[8], weight[8], shift[8] = {};
      unpack<T>(*reinterpret_cast<const uint4*>(x + of.row * a.x_stride + int64_t(column) * 2), values);
      unpack<T>(__ldg(reinterpret_cast<const uint4*>(a.norm_weight + int64_t(column) * 2)), weight);
      if (a.norm_bias) unpack<T>(__ldg(reinterpret_cast<const uint4*>(a.norm_bias + int64_t(column) * 2)), shift);
      const float2 moments = mean_rstd[of.row];
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = fmaf((values[e] - moments.x) * moments.y, weight[e], shift[e]);
      raw = pack<T>(values);
    }
    store_shared(of.place(to, of.now), raw);
  }
}

// The products of one stage. `mine` is where this lane's weights stand in the ring, `groups_at` its rows' scales and
// zero points, `x_at` its activations.
template <class T, class Weights, int kColumnBlocks>
__device__ __forceinline__ void multiply_stage(
    const LinearArguments& a, uint32_t mine, uint32_t groups_at, uint32_t x_at, int columns,
    float (&sums)[LinearShape<Weights, kColumnBlocks>::kTiles][kColumnBlocks][4]) {
  using Shape = LinearShape<Weights, kColumnBlocks>;
  constexpr int kTiles = Shape::kTiles, kVectors = Weights::kVectors, kHalves = 2 * Shape::kDepth;
  constexpr int kSlot = kLinearThreads * 16;
  const int group = int(threadIdx.x) % kWarp / 4;
  const auto slot = [&](int tile, int depth, int vector) {
    return mine + ((tile * Shape::kDepth + depth) * kVectors + vector) * kSlot;
  };
  uint4 raw[kTiles];
  const auto weights_of = [&](uint32_t (&w)[kTiles][2][4], int half) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if constexpr (Weights::kFormat == FUSELINE_WEIGHT_16) {
        const uint4 above = load_shared(slot(t, 0, 2 * half)), below = load_shared(slot(t, 0, 2 * half + 1));
        w[t][0][0] = above.x, w[t][0][1] = below.x, w[t][0][2] = above.y, w[t][0][3] = below.y;
        w[t][1][0] = above.z, w[t][1][1] = below.z, w[t][1][2] = above.w, w[t][1][3] = below.w;
      } else if constexpr (Weights::kFormat == FUSELINE_WEIGHT_INT8) {
        raw[t] = load_shared(slot(t, half / 2, half % 2));
        Weights::template step<T>(w[t][0], raw[t].x, raw[t].y);
        Weights::template step<T>(w[t][1], raw[t].z, raw[t].w);
      } else {
        if (half % 2 == 0) raw[t] = load_shared(slot(t, half / 2, 0));
        uint32_t zero[2] = {kIntegers<T> + 0x00080008u, kIntegers<T> + 0x00080008u};
        if (a.zeros) {  // bytes: rows g and g + 8 of an even g, then of the odd one after it
          const uint32_t both = load_shared_word(groups_at + t * 256 + 128 + half * 4) >> (group % 2 * 16);
          zero[0] = kIntegers<T> + (both & 0xffu) * 0x10001u;
          zero[1] = kIntegers<T> + (both >> 8 & 0xffu) * 0x10001u;
        }
        Weights::template step<T>(w[t][0], half % 2 == 0 ? raw[t].x : raw[t].z, zero);
        Weights::template step<T>(w[t][1], half % 2 == 0 ? raw[t].y : raw[t].w, zero);
      }
    }
  };
  // Products of the halves that `begins` and `ends` bracket are added up and scaled together.
  const auto run = [&](auto begins, auto ends) {
    [[maybe_unused]] float part[kTiles][kColumnBlocks][4];
    // One block of columns is one chain of products, each waiting for the one before: every other one goes apart.
    [[maybe_unused]] float apart[kTiles][4];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint32_t w[kTiles][2][4];
      weights_of(w, half);
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c) {
        const uint4 b = c * 8 + group < columns ? load_shared(x_at + half * columns * 64 + c * 512)
                                                : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          float(&one)[4] = Weights::kGrouped ? part[t][c] : sums[t][c];
          float(&other)[4] = kColumnBlocks == 1 ? apart[t] : one;
          if (Weights::kGrouped && begins(half)) one[0] = one[1] = one[2] = one[3] = 0;
          if (kColumnBlocks == 1 && begins(half)) other[0] = other[1] = other[2] = other[3] = 0;
          mma_16816<T>(one, w[t][0], b.x, b.y);
          mma_16816<T>(other, w[t][1], b.z, b.w);
          if (kColumnBlocks == 1 && ends(half)) {
#pragma unroll
            for (int i = 0; i < 4; ++i) one[i] += other[i];
          }
        }
      }
      if constexpr (Weights::kGrouped) {
        if (!ends(half)) continue;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const float2 scale = unpack_pair<__nv_bfloat16>(load_shared_word(groups_at + t * 256 + half * 4));
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
  };
  if (!Weights::kGrouped || a.group_shift >= Shape::kDepth) {  // a group is the stage's columns, and more
    run([](int half) { return half == 0; }, [](int half) { return half == kHalves - 1; });
  } else {
    const int mask = (1 << a.group_shift) - 1;
    run([mask](int half) { return (half & mask) == 0; }, [mask](int half) { return (half & mask) == mask; });
  }
}

template <class T, class Weights, int kColumnBlocks>
__global__ void __launch_bounds__(kLinearThreads, LinearShape<Weights, kColumnBlocks>::kBlocks)
    quant_linear_kernel(const LinearArguments a) {
  using Shape = LinearShape<Weights, kColumnBlocks>;
  constexpr int kTiles = Shape::kTiles, kDepth = Shape::kDepth, kStages = Shape::kStages;
  constexpr int kVectors = Weights::kVectors;
  constexpr bool kPlain = Weights::kFormat == FUSELINE_WEIGHT_16;
  constexpr int kSlot = kLinearThreads * 16;
  constexpr int kChunkBytes = kVectors * kWarp * 16;  // of a packed tile
  extern __shared__ __align__(16) char shared[];

  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int group = lane / 4, quad = lane % 4;
  const int row_warp = warp % a.row_warps, depth_warp = warp / a.row_warps, depth_warps = kLinearWarps / a.row_warps;
  const int split = int(blockIdx.x) % a.splits;
  const int first_unit = int(blockIdx.x) / a.splits, unit_step = int(gridDim.x) / a.splits;
  const int begin = split * a.chunks_a_split, limit = min((begin + a.chunks_a_split) * kTileColumns, a.k);
  const int rows = a.row_warps * kTiles * kTileRows, row_bits = 31 - __clz(rows);
  const int chunks_a_pass = a.stages_a_pass * depth_warps * kDepth;

  const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared));
  const uint32_t x_shared = ring + a.ring_bytes;
  float* const planes = reinterpret_cast<float*>(shared + a.ring_bytes + a.x_bytes);
  // In a stage: this lane's weights, its rows' scales (all lanes with these rows read them), and the one it copies.
  const uint32_t my_weights = thread * 16;
  const uint32_t my_groups = Shape::kWeightBytes + warp * kTiles * 256 + group * 16;

  // Where this lane's next stage stands, the chunk it begins with, and from there to the next tile's rows, and to row
  // g + 8; stages to go in this unit.
  const char* from = nullptr;
  int64_t next_tile = 0, below = 0;
  int chunk = 0, tile = 0, tile_step = 0, to_go = 0;
  static_assert(kTiles == 1 || (kTiles == 2 && !kPlain));
  static_assert(kDepth == 1 || !kPlain);
  const int step_chunks = depth_warps * kDepth, step_bytes = step_chunks * (kPlain ? kTileColumns * 2 : kChunkBytes);
  const auto begin_unit = [&](int unit) {  // what is past the last row is read for nothing
    const int place = ((unit / a.over_m) * a.row_warps + row_warp) * kTiles;
    tile = tile_at(a, min(place, a.tiles - (a.halves ? kTiles : 1)));
    tile_step = a.halves ? a.halves : min(1, a.tiles - 1 - tile);
    chunk = begin + depth_warp * kDepth;
    to_go = a.stages;
    if constexpr (kPlain) {
      const int row = min(tile * kTileRows + group, a.n - 1);
      from = a.weight + row * a.weight_stride + int64_t(chunk) * kTileColumns * 2 + quad * 16;
      below = (min(row + 8, a.n - 1) - row) * a.weight_stride;
    } else {
      const int64_t row_bytes = int64_t(a.chunks) * kChunkBytes;
      from = a.weight + tile * row_bytes + int64_t(chunk) * kChunkBytes + lane * 16;
      next_tile = tile_step * row_bytes;
    }
  };
  const auto x_of = [&](int unit) { return a.x + (unit % a.over_m) * 8 * kColumnBlocks * a.x_stride; };
  const auto columns_of = [&](int unit) { return min(a.m - unit % a.over_m * 8 * kColumnBlocks, 8 * kColumnBlocks); };

  int fetch_unit = first_unit, fetch_step = 0, fetch_pass = 0, fetch_buffer = 0;
  const auto fetch = [&](uint32_t stage) {  // into the ring at `stage`
    if (fetch_unit < a.units) {
      if (!a.x_stays) {
        if (fetch_step == 0 && (fetch_unit != first_unit || fetch_pass > 0)) {
          fetch_x(a, x_of(fetch_unit), x_shared + fetch_buffer * a.pass_bytes,
                  StretchOfX(columns_of(fetch_unit), begin + fetch_pass * chunks_a_pass, chunks_a_pass, limit));
        }
        if (++fetch_step == a.stages_a_pass) fetch_step = 0, ++fetch_pass, fetch_buffer ^= 1;
      }
      const uint32_t to = stage + my_weights;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            const uint32_t place = to + ((t * kDepth + d) * kVectors + v) * kSlot;
            if constexpr (kPlain) {
              const bool inside = chunk * kTileColumns + v / 2 * 32 + quad * 8 < a.k;
              copy_async(place, inside ? from + v % 2 * below + v / 2 * 64 : a.weight, inside ? 16 : 0);
            } else if (chunk + d < a.chunks) {  // past the end any integers will do: x is zero there
              copy_async(place, from + t * next_tile + d * kChunkBytes + v * (kWarp * 16));
            }
          }
        }
        if constexpr (Weights::kGrouped) {  // lane 4 g + q: of rows g and g + 8, for half q of the stage
          const int of = min((2 * chunk + quad) >> a.group_shift, a.groups - 1);
          const int64_t word = (int64_t(tile + t * tile_step) * a.groups + of) * 8 + group;
          const uint32_t place = stage + my_groups + t * 256 + quad * 4;
          copy_word_async(place, a.scales + word);
          if (a.zeros) copy_word_async(place + 128, a.zeros + word / 2);
        }
      }
      from += step_bytes;
      chunk += step_chunks;
      if (--to_go == 0) {
        fetch_unit += unit_step, fetch_pass = 0;
        if (fetch_unit < a.units) begin_unit(fetch_unit);
      }
    }
    commit_copies();
  };

  begin_unit(first_unit);
  // The ring's first round towards the L2, while the kernel before may still be at work.
  const int ahead = kPlain ? quad : lane, first_chunk = chunk + ahead * step_chunks;
  if (ahead < min(kStages, a.stages) && first_chunk < a.chunks) {
    if constexpr (kPlain) {
      const char* const at = from - quad * 16 + ahead * step_bytes;
      const int bytes = min(kTileColumns, a.k - first_chunk * kTileColumns) * 2;
      prefetch_to_l2(at, bytes);
      prefetch_to_l2(at + below, bytes);
    } else {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        prefetch_to_l2(from - lane * 16 + t * next_tile + int64_t(ahead) * step_bytes,
                       min(kDepth, a.chunks - first_chunk) * kChunkBytes);
      }
    }
  }
  if (!a.overlap) wait_for_earlier();
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) fetch(ring + i * Shape::kStageBytes);
  if (a.overlap) wait_for_earlier();
  let_next_start();
  const StretchOfX stretch(columns_of(first_unit), begin, chunks_a_pass, limit);
  if (a.norm == FUSELINE_NORM_NONE) {
    load_x(a, x_of(first_unit), x_shared, stretch);
  } else {
    norm_x<T>(a, x_of(first_unit), x_shared, planes, stretch);
  }

  int step = 0, buffer = 0;
  uint32_t stage_at = ring;
  for (int unit = first_unit; unit < a.units; unit += unit_step) {
    const int first_row = (unit % a.over_m) * 8 * kColumnBlocks, columns = columns_of(unit);
    // All outputs of a thread are of one feature, and for SwiGLU of its gate.
    const int row = thread & (rows - 1), place_of_tile = (unit / a.over_m) * (rows / kTileRows) + row / kTileRows;
    const int feature = tile_at(a, place_of_tile) * kTileRows + row % kTileRows;
    const bool inside = place_of_tile < a.tiles && feature < a.n && !(a.halves && place_of_tile % 2);
    const auto scale_of = [&](int of) {
      return Weights::kFormat == FUSELINE_WEIGHT_INT8 ? __uint_as_float(__ldg(a.scales + of)) : 1.f;
    };
    const auto shift_of = [&](int of) { return a.bias ? to_float(reinterpret_cast<const T*>(a.bias)[of]) : 0.f; };
    const float scale = inside ? scale_of(feature) : 0.f, shift = inside ? shift_of(feature) : 0.f;
    float sums[kTiles][kColumnBlocks][4] = {};
    const int first_x = depth_warp * kDepth * columns * 128 + lane * 16, step_x = step_chunks * columns * 128;
    uint32_t x_at = x_shared + buffer * a.pass_bytes + first_x;
    for (int stage = 0; stage < a.stages; ++stage) {
      wait_for_copies<kStages - 1>();
      if (step == 0 && (!a.x_stays || unit == first_unit)) {
        __syncthreads();
      } else if constexpr (Weights::kGrouped) {
        __syncwarp();  // scales were copied for each other
      }
      multiply_stage<T, Weights, kColumnBlocks>(a, stage_at + my_weights, stage_at + my_groups, x_at, columns, sums);
      if constexpr (Weights::kGrouped) __syncwarp();
      fetch(stage_at);
      x_at += step_x;
      if (++step == a.stages_a_pass) {
        step = 0;
        if (!a.x_stays) buffer ^= 1;
        x_at = x_shared + buffer * a.pass_bytes + first_x;
      }
      stage_at += Shape::kStageBytes;
      if (stage_at == ring + kStages * Shape::kStageBytes) stage_at = ring;
    }

    // The sums of all warps, [depth_warp][row of x][row of W]; four floats between rows of x keep the banks apart.
    const int pitch = rows + 4, plane = columns * pitch;
    if (unit != first_unit) {  // nobody reads the last unit's any more
      if (a.splits > 1) {
        cluster_wait();
      } else {
        __syncthreads();
      }
    }
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
    const int count = columns << row_bits;
    if (a.splits > 1) {
      if (depth_warps > 1) {
        for (int i = thread; i < count; i += kLinearThreads) {
          const int place = (i >> row_bits) * pitch + row;
          float sum = planes[place];
          for (int d = 1; d < depth_warps; ++d) sum += planes[d * plane + place];
          planes[place] = sum;
        }
      }
      cluster_arrive();
      cluster_wait();
    }
    for (int i = split * kLinearThreads + thread; i < count; i += a.splits * kLinearThreads) {
      if (!inside) break;
      const auto sum_at = [&](int place) {
        float sum = 0;
        if (a.splits > 1) {
          for (int s = 0; s < a.splits; ++s) sum += load_in_cluster(planes + place, s);
        } else {
          for (int d = 0; d < depth_warps; ++d) sum += planes[d * plane + place];
        }
        return sum;
      };
      const int column = i >> row_bits, place = column * pitch + row;
      float sum = fmaf(sum_at(place), scale, shift);
      if (a.activation == FUSELINE_ACTIVATION_SWIGLU) {
        const int other = feature + a.halves * kTileRows;
        sum = Silu<T>::value(sum) * fmaf(sum_at(place + kTileRows), scale_of(other), shift_of(other));
      } else if (a.activation == FUSELINE_ACTIVATION_GELU) {
        sum = GeluErf<T>::value(sum);
      } else if (a.activation == FUSELINE_ACTIVATION_GELU_TANH) {
        sum = GeluTanh<T>::value(sum);
      }
      const int64_t to = int64_t(first_row + column) * (a.halves ? a.n / 2 : a.n) + feature;
      if (a.residual) sum += to_float(reinterpret_cast<const T*>(a.residual)[to]);
      reinterpret_cast<T*>(a.y)[to] = from_float<T>(sum);
    }
    if (a.splits > 1) cluster_arrive();
  }
  // Nobody leaves while others of the cluster read here.
  if (a.splits > 1) cluster_wait();
}

// ---- launch ----

// Fills in what follows from row_warps and splits. Answers the bytes of shared memory that a block takes.
template <class Weights, int kColumnBlocks>
int lay_out_linear(LinearArguments& a, int row_warps, int splits, const Device& device) {
  using Shape = LinearShape<Weights, kColumnBlocks>;
  constexpr int kStays = 64 * 1024, kPass = 16 * 1024;
  const int columns = std::min(a.m, 8 * kColumnBlocks), depth_warps = kLinearWarps / row_warps;
  const int stage_chunks = depth_warps * Shape::kDepth, stage_bytes = stage_chunks * columns * kTileColumns * 2;  // of x
  a.row_warps = row_warps, a.splits = splits;
  a.over_m = int(divide_up(a.m, 8 * kColumnBlocks));
  a.units = int(divide_up(a.tiles, row_warps * Shape::kTiles)) * a.over_m;
  a.chunks_a_split = int(divide_up(divide_up(a.chunks, splits), Shape::kDepth)) * Shape::kDepth;
  a.stages = int(divide_up(a.chunks_a_split, stage_chunks));
  a.ring_bytes = Shape::kStages * Shape::kStageBytes;
  const int plane_bytes = depth_warps * columns * (row_warps * Shape::kTiles * kTileRows + 4) * 4;
  const int room = std::min(kStays, device.shared_a_block - a.ring_bytes - plane_bytes);
  a.x_stays = a.over_m == 1 && int64_t(a.stages) * stage_bytes <= room;
  if (a.x_stays) {
    a.stages_a_pass = a.stages;
  } else {  // equal passes no shorter than the ring: x of a pass is asked for while the pass before is computed
    const int passes = std::max(1, a.stages / std::max(Shape::kStages, kPass / stage_bytes));
    a.stages_a_pass = std::max<int>(Shape::kStages, divide_up(a.stages, passes));
    a.stages = passes * a.stages_a_pass;
  }
  a.pass_bytes = a.stages_a_pass * stage_bytes;
  a.x_bytes = a.pass_bytes * (a.x_stays ? 1 : 2);
  return a.ring_bytes + a.x_bytes + plane_bytes;
}

// Blocks of so much shared memory that a multiprocessor holds.
template <class Weights, int kColumnBlocks>
int linear_blocks(int shared, const Device& device) {
  constexpr int kReserved = 1024;  // the system's own, for each block
  return std::min(LinearShape<Weights, kColumnBlocks>::kBlocks, device.shared_a_processor / (shared + kReserved));
}

// Chooses how many warps have rows apart and how many blocks share columns, by the time that the busiest multiprocessor
// should take, in bytes of weights. Answers the bytes of shared memory, 0 if what is asked for cannot be.
template <class Weights, int kColumnBlocks>
int plan_linear(LinearArguments& a, const fuseline_linear& call, const Device& device) {
  using Shape = LinearShape<Weights, kColumnBlocks>;
  constexpr int64_t kUnitBytes = 4 * 1024;      // what ending a unit costs
  constexpr int64_t kClusterBytes = 48 * 1024;  // and launching clusters that meet
  const int64_t columns = std::min(a.m, 8 * kColumnBlocks);
  int64_t best = 0;
  int best_row_warps = 0, best_splits = 0;
  for (int row_warps = 1; row_warps <= kLinearWarps; row_warps *= 2) {
    if (call.row_warps && call.row_warps != row_warps) continue;
    if (a.halves && row_warps * Shape::kTiles % 2) continue;  // a block has both of a pair
    for (int splits = 1; splits <= (device.clusters ? kMostSplits : 1); splits *= 2) {
      if (call.splits && call.splits != splits) continue;
      const int shared = lay_out_linear<Weights, kColumnBlocks>(a, row_warps, splits, device);
      const int64_t a_split = a.chunks_a_split, rows = row_warps * Shape::kTiles * kTileRows;
      if (splits > 1 && a_split * (splits - 1) >= a.chunks) continue;  // a block would have nothing
      if (shared > device.shared_a_block || (a.norm && !a.x_stays)) continue;  // x is normed once, before the products
      const int64_t weights = int64_t(a.stages) * Shape::kWeightBytes;
      const int64_t x = a_split * columns * kTileColumns * 2, sums = columns * rows * 4 * (splits > 1 ? 4 : 2);
      const int64_t unit = weights + (a.x_stays ? 0 : 2 * x) + sums + kUnitBytes;
      // Blocks that are done leave the bandwidth to the others: a last round half empty costs less than a full one.
      const int64_t blocks = int64_t(a.units) * splits, rounds = divide_up(blocks, device.processors);
      int64_t cost = (unit * blocks / device.processors + 2 * unit * rounds) / 3;
      cost += (a.x_stays ? x : 0) + (splits > 1 ? kClusterBytes : 0);
      if (linear_blocks<Weights, kColumnBlocks>(shared, device) * a.ring_bytes < 48 * 1024) cost += cost / 4;
      if (best == 0 || cost < best) best = cost, best_row_warps = row_warps, best_splits = splits;
    }
  }
  return best == 0 ? 0 : lay_out_linear<Weights, kColumnBlocks>(a, best_row_warps, best_splits, device);
}

template <class T, class Weights, int kColumnBlocks>
int launch_linear(LinearArguments a, const fuseline_linear& call, const Device& device, void* stream) {
  const auto kernel = quant_linear_kernel<T, Weights, kColumnBlocks>;
  const int shared = plan_linear<Weights, kColumnBlocks>(a, call, device);
  if (shared == 0) return FUSELINE_UNSUPPORTED;
  static thread_local uint64_t granted = 0;  // devices on which this kernel may have all the shared memory
  if (device.index >= 64 || !(granted >> device.index & 1)) {
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_a_block);
    if (error != cudaSuccess) return int(error);
    if (device.index < 64) granted |= uint64_t(1) << device.index;
  }
  const int resident = device.processors * linear_blocks<Weights, kColumnBlocks>(shared, device) / a.splits;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(std::min(a.units, std::max(1, resident)) * a.splits));
  config.blockDim = dim3(kLinearThreads);
  config.dynamicSmemBytes = size_t(shared);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (device.clusters) {  // sm_90, which has both
    attributes[0] = overlapping();
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = unsigned(a.splits);
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    config.numAttrs = a.splits > 1 ? 2 : 1;
  }
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

// The kernels of one format and dtype, compiled apart; arguments are checked by then (quant_linear.cu).
template <class T, class Weights>
int run_linear(const LinearArguments& a, const fuseline_linear& call, void* stream);

int launch_gemv_16(const LinearArguments& a, const fuseline_linear& call, void* stream);  // up to four rows of x

#define FUSELINE_LINEAR_KERNELS(T, Weights)                                                             \
  template <>                                                                                           \
  int run_linear<T, Weights>(const LinearArguments& a, const fuseline_linear& call, void* stream) {    \
    Device device;                                                                                      \
    const cudaError_t error = current_device(device);                                                   \
    if (error != cudaSuccess) return int(error);                                                        \
    return launch_linear<T, Weights>(a, call, device, stream);                                          \
  }

}  // namespace fuseline
