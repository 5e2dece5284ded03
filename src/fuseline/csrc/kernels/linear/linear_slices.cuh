// Linear layers for 5 to 32 rows of activations, quantized weights, on Hopper: slices of columns to the blocks of a cluster.
//
// Floor: the bytes of W over the copy bandwidth, 16.7 us for 4096 x 12288 in int8 and 15 for 11008 x 4096. What is above it
// is what HBM idles while one launch ends and the next one gets x: 48 KB of weights under way a multiprocessor do not last for
// that. Here 72 to 96 KB are on their way to registers before the launch waits for the one ahead, and 64 to 128 KB more to the
// L2: 18.7 us for 4096 x 12288 beside 16 rows, 20.2 without these, 22.8 in tiles (linear_tiles.cuh), where each block reads x
// anew step by step.
//
// A block fills a multiprocessor. The blocks of a cluster share the columns of the same tiles (16 rows of W): each has its
// slice of x in shared memory, and each of its warps one tile at a time, whose slice is one stretch of memory. It comes
// straight to registers as the A of tensor-core products, some steps ahead; no warp waits for another. Sums of a tile go to
// the block of the cluster that writes it by stores into its shared memory, which a barrier there counts: nobody meets
// anybody at the end. They are added in the order of blocks: the same bits each run.
#pragma once

#include "linear_tiles_sums.cuh"
#include "linear_x.cuh"

namespace fuseline {

// x of `rows` rows as fetch_rows and load_rows (linear_x.cuh) bring it, by as many threads as the block has.
__device__ __forceinline__ void fetch_slice(const LinearArguments& a, char* shared, uint64_t* arrived, int begin, int chunks,
                                            int limit) {
  const int thread = threadIdx.x, first = begin * kTileColumns, there = limit - first;
  if (thread < kWarp) {
    if (thread == 0) barrier_expect(arrived, a.m * there * 2);
    __syncwarp();
    for (int row = thread; row < a.m; row += kWarp) {
      copy_in(shared + row * x_pitch(chunks), a.x + row * a.x_stride + int64_t(first) * 2, there * 2, arrived);
    }
  }
  const int past = chunks * kTileColumns - there;  // a multiple of 8
  for (int i = thread; i < a.m * (past / 8); i += blockDim.x) {
    const int row = i / (past / 8), vector = i - row * (past / 8);
    *reinterpret_cast<uint4*>(shared + row * x_pitch(chunks) + there * 2 + vector * 16) = make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void load_slice(const LinearArguments& a, uint32_t shared, int begin, int chunks, int limit) {
  constexpr int kTogether = 4;
  const int vectors = chunks * (kTileColumns / 8), count = a.m * vectors, threads = blockDim.x;
  for (int first = threadIdx.x; first < count; first += kTogether * threads) {
    uint4 raw[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = first + u * threads, row = i / vectors;
      if (i < count) raw[u] = load_eight(a.x + row * a.x_stride, begin * kTileColumns + 8 * (i - row * vectors), limit);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = first + u * threads, row = i / vectors;
      if (i < count) store_shared(shared + row * x_pitch(chunks) + 16 * (i - row * vectors), raw[u]);
    }
  }
}

template <class Weights>
constexpr int kSliceChunks = slice_chunks(Weights::kFormat);

template <class T, class Weights, int kColumnBlocks>
__device__ __forceinline__ void multiply_slice_step(const uint4 (&raw)[2], uint32_t scale, uint32_t x_at, uint32_t eight_rows,
                                                    float (&sums)[kColumnBlocks][4]) {
  constexpr bool kInt4 = Weights::kFormat == FUSELINE_WEIGHT_INT4;
  constexpr int kHalves = 2 * kSliceChunks<Weights>;
  float part[kInt4 ? kColumnBlocks : 1][4];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    uint32_t w[2][4];
    if constexpr (kInt4) {
      const uint32_t zero[2] = {kIntegers<T> + 0x00080008u, kIntegers<T> + 0x00080008u};
      const uint4 both = raw[half / 2];
      Weights::template step<T>(w[0], half % 2 == 0 ? both.x : both.z, zero);
      Weights::template step<T>(w[1], half % 2 == 0 ? both.y : both.w, zero);
    } else {
      Weights::template step<T>(w[0], raw[half].x, raw[half].y);
      Weights::template step<T>(w[1], raw[half].z, raw[half].w);
    }
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
      const uint4 b = load_shared(x_at + c * eight_rows + half * 64);
      float(&to)[4] = kInt4 ? part[kInt4 ? c : 0] : sums[c];
      if (kInt4 && half == 0) to[0] = to[1] = to[2] = to[3] = 0.f;
      mma_16816<T>(to, w[0], b.x, b.y);
      mma_16816<T>(to, w[1], b.z, b.w);
    }
  }
  if constexpr (kInt4) {
    const float2 scales = unpack_pair<__nv_bfloat16>(scale);
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[c][i] = fmaf(i < 2 ? scales.x : scales.y, part[c][i], sums[c][i]);
    }
  }
}

// What of the work this block has. Asked for again after the products: registers are short during them.
struct SliceShare {
  int rank, first, units;  // place in the cluster; tiles of it

  __device__ __forceinline__ explicit SliceShare(const LinearArguments& a) {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    const int cluster = block / a.splits;
    rank = block - cluster * a.splits;
    first = cluster * a.base + min(cluster, a.extra), units = a.base + (cluster < a.extra);
  }
  // Blocks of sums, eight rows of x of a tile, that this block writes: every a.splits-th.
  template <int kColumnBlocks>
  __device__ __forceinline__ int own(const LinearArguments& a) const {
    return (units * kColumnBlocks + a.splits - 1 - rank) / a.splits;
  }
};

template <class T, class Weights, int kColumnBlocks>
__global__ void __launch_bounds__(kSliceWarps * kWarp, 1) linear_slices_kernel(const __grid_constant__ LinearArguments a) {
  constexpr bool kInt4 = Weights::kFormat == FUSELINE_WEIGHT_INT4;
  constexpr int kChunks = kSliceChunks<Weights>, kStepVectors = 1024 / 16, kAhead = 6;
  extern __shared__ __align__(16) char shared[];
  __shared__ uint64_t x_there, sums_there;
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp, group = lane / 4, quad = lane % 4;
  const int warps = int(blockDim.x) / kWarp;
  const SliceShare share(a);
  const int rank = share.rank, first = share.first, units = share.units, own = share.own<kColumnBlocks>(a);
  const int begin = a.steps * rank / a.splits, slice = a.steps * (rank + 1) / a.splits - begin;
  if (thread == 0) {
    barrier_init(&x_there, 1);
    barrier_init(&sums_there, 1);
    publish_barriers();
    barrier_expect(&sums_there, own * a.splits * (kWarp * 16));
  }
  cluster_arrive();

  // The next step to be asked for.
  int left = (units - warp + warps - 1) / warps * slice, load_at = 0;  // steps
  const int tile_vectors = a.chunks * (kStepVectors / kChunks);
  uint32_t from = uint32_t(first + warp) * tile_vectors + begin * kStepVectors + lane;  // 16-byte vectors of weights
  const int to_next = warps * tile_vectors - slice * kStepVectors;
  [[maybe_unused]] uint32_t scales_from = uint32_t(first + warp) * a.groups * 8 + group;  // words
  uint4 raw[kAhead][2];
  uint32_t scale[kInt4 ? kAhead : 1];
  const auto load = [&](int u, int ahead) {
    if (left <= ahead) return;
    // Past the last columns any weights will do: x is zero there.
    const bool inside = !kInt4 || (begin + load_at) * 2 + 1 < a.chunks;
    const char* const at = a.weight + int64_t(from) * 16;
    raw[u][0] = load_once(at);
    raw[u][1] = load_once(at + (inside ? 512 : 0));
    if constexpr (kInt4) scale[u] = __ldg(a.scales + (scales_from + ((begin + load_at) >> (a.group_shift - 2)) * 8));
    from += kStepVectors;
    if (++load_at == slice) {
      load_at = 0, from += to_next;
      if constexpr (kInt4) scales_from += warps * a.groups * 8;
    }
  };
  if (!a.overlap) wait_for_earlier();
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load(u, u);
  if (a.overlap) {
    // More of the tile is asked of the L2, line by line: what the copy engine were asked for, x would have to wait behind.
    if (left > kAhead) {
      const int lines = min(a.prefetched, slice - load_at) * 8, line = int(from - lane) / 8;
      for (int i = lane; i < lines && line + i < (first + units) * tile_vectors / 8; i += kWarp) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(a.weight + int64_t(line + i) * 128));
      }
    }
    __syncwarp();
    wait_for_earlier();
  }
  const int x_chunks = a.steps_a_split * kChunks, limit = min((begin + slice) * kChunks * kTileColumns, a.k);
  if (a.x_vectors) fetch_slice(a, shared, &x_there, begin * kChunks, x_chunks, limit);
  let_next_start();

  float4* const incoming = reinterpret_cast<float4*>(shared + a.x_bytes);  // [own sums][block][lane]
  float2* const around = reinterpret_cast<float2*>(shared + a.x_bytes + a.scale_bytes);
  for (int i = thread; i < own * kTileRows; i += blockDim.x) {
    const int row = (first + (rank + i / kTileRows * a.splits) / kColumnBlocks) * kTileRows + i % kTileRows;
    const float scale = !kInt4 && row < a.n ? __uint_as_float(__ldg(a.scales + row)) : 1.f;
    const float shift = a.bias && row < a.n ? to_float(reinterpret_cast<const T*>(a.bias)[row]) : 0.f;
    around[i] = make_float2(scale, shift);
  }
  const uint32_t x_shared = shared_address(shared);
  if (!a.x_vectors) load_slice(a, x_shared, begin * kChunks, x_chunks, limit);
  __syncthreads();
  cluster_wait();  // the others' barriers are there
  if (a.x_vectors) barrier_wait(&x_there, 0);

  const uint32_t eight_rows = 8 * x_pitch(x_chunks);  // of those past the last nobody reads the sums
  uint32_t x_at = x_shared + group * x_pitch(x_chunks) + quad * 16;
  float sums[kColumnBlocks][4] = {};
  int at = 0, tile = warp;
  for (; left > 0; left -= kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (u >= left) break;
      multiply_slice_step<T, Weights, kColumnBlocks>(raw[u], scale[kInt4 ? u : 0], x_at, eight_rows, sums);
      load(u, u + kAhead);
      x_at += kChunks * kTileColumns * 2;
      if (++at < slice) continue;
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c) {
        const int block = tile * kColumnBlocks + c, slot = block / a.splits, owner = block - slot * a.splits;
        float4* const to = incoming + (slot * a.splits + rank) * kWarp + lane;
        send_in_cluster(to, &sums_there, owner, make_float4(sums[c][0], sums[c][1], sums[c][2], sums[c][3]));
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[c][i] = 0.f;
      }
      x_at -= slice * (kChunks * kTileColumns * 2), at = 0, tile += warps;
    }
  }
  barrier_wait(&sums_there, 0);
  const SliceShare mine(a);
  for (int slot = warp; slot < mine.own<kColumnBlocks>(a); slot += warps) {
    const int block = mine.rank + slot * a.splits, of_x = block % kColumnBlocks * 8;
    if (of_x >= a.m) continue;
    const float4* const parts = incoming + slot * a.splits * kWarp + lane;
    float four[4] = {};
#pragma unroll 4
    for (int s = 0; s < a.splits; ++s) {
      const float4 more = parts[s * kWarp];
      four[0] += more.x, four[1] += more.y, four[2] += more.z, four[3] += more.w;
    }
    const float2 one = around[slot * kTileRows + group], other = around[slot * kTileRows + group + 8];
    const AroundSums<T, Weights> rows(one, other, (mine.first + block / kColumnBlocks) * kTileRows + group);
    rows.write(a, four, of_x);
  }
}

}  // namespace fuseline
