// A stable sort of ids, with where they came from: least significant digit first, two kernels a digit of at most 8 bits.
//
// Made for the ids of an embedding, ten thousand to a few million of 10 to 17 bits: the time is that of the launches, and
// then of a warp's steps through its stretch. At most kMostTiles blocks have a tile each, in which each warp has a stretch.
// First every tile counts its digits; then each block adds up the counts of the tiles before it, and each warp moves its
// items in order, so that equal digits keep theirs: the same result each run.
#pragma once

#include "elementwise.cuh"

namespace fuseline {

constexpr int kSortBlock = 1024;
constexpr int kSortWarps = kSortBlock / kWarp;
constexpr int kDigits = 256;
constexpr int kOfDigit = kSortBlock / kDigits;  // threads that add up the counts of one digit
constexpr int kMostTiles = 128;

struct SortPass {
  const int64_t* ids;    // of the first pass, item i being ids[i % period]; those outside 0 .. rows, and `skipped`, sort
  int64_t period;        // as `rows`
  int64_t skipped;
  const uint32_t* keys;  // of the others
  const uint32_t* from;
  uint32_t* keys_out;
  uint32_t* from_out;    // where in `ids` an item was
  uint32_t* counts;      // [tiles, kDigits]
  uint32_t count, rows;
  uint32_t tile, tiles;  // items of a tile, a multiple of kSortBlock
  int shift;
};

template <bool kFirst>
__device__ __forceinline__ uint32_t sort_key(const SortPass& a, uint32_t item) {
  if constexpr (!kFirst) return a.keys[item];
  const int64_t id = a.ids[a.period >= a.count ? item : item % uint32_t(a.period)];
  return id < 0 || id >= a.rows || id == a.skipped ? a.rows : uint32_t(id);
}

template <bool kFirst>
__global__ void __launch_bounds__(kSortBlock) sort_count(const SortPass a) {
  __shared__ uint32_t counts[kDigits];
  if (threadIdx.x < kDigits) counts[threadIdx.x] = 0;
  __syncthreads();
  const uint32_t begin = blockIdx.x * a.tile, end = min(begin + a.tile, a.count);
  for (uint32_t item = begin + threadIdx.x; item < end; item += kSortBlock) {
    atomicAdd(&counts[sort_key<kFirst>(a, item) >> a.shift & (kDigits - 1)], 1u);
  }
  __syncthreads();
  if (threadIdx.x < kDigits) a.counts[blockIdx.x * kDigits + threadIdx.x] = counts[threadIdx.x];
}

template <bool kFirst>
__global__ void __launch_bounds__(kSortBlock) sort_move(const SortPass a) {
  __shared__ uint32_t next[kSortWarps][kDigits];
  __shared__ uint32_t counted[2][kOfDigit][kDigits];  // in all tiles, and in those before this
  __shared__ uint32_t of_warp[kDigits / kWarp];
  const uint32_t digit = threadIdx.x % kDigits, part = threadIdx.x / kDigits;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int w = int(part); w < kSortWarps; w += kOfDigit) next[w][digit] = 0;
  __syncthreads();
  const uint32_t stretch = a.tile / kSortWarps;
  const uint32_t begin = blockIdx.x * a.tile + warp * stretch, end = min(begin + stretch, a.count);
  for (uint32_t item = begin + lane; item < end; item += kWarp) {
    atomicAdd(&next[warp][sort_key<kFirst>(a, item) >> a.shift & (kDigits - 1)], 1u);
  }
  // Where this digit's items of this tile go: behind all smaller digits, and those of the tiles before.
  uint32_t all = 0, before = 0;
#pragma unroll 8
  for (uint32_t t = part; t < a.tiles; t += kOfDigit) {
    const uint32_t count = a.counts[t * kDigits + digit];
    all += count;
    before += t < blockIdx.x ? count : 0;
  }
  counted[0][part][digit] = all, counted[1][part][digit] = before;
  __syncthreads();
  uint32_t smaller = 0;
  if (threadIdx.x < kDigits) {
    for (int other = 1; other < kOfDigit; ++other) all += counted[0][other][digit], before += counted[1][other][digit];
    smaller = all;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, smaller, step);
      if (lane >= step) smaller += other;
    }
    if (lane == kWarp - 1) of_warp[warp] = smaller;
  }
  __syncthreads();
  if (threadIdx.x < kDigits) {
    for (int w = 0; w < int(warp); ++w) smaller += of_warp[w];
    uint32_t place = smaller - all + before;
    for (int w = 0; w < kSortWarps; ++w) {
      const uint32_t count = next[w][digit];
      next[w][digit] = place;
      place += count;
    }
  }
  __syncthreads();
  uint32_t key = 0, came = 0;
  const auto load = [&](uint32_t item) {
    if (item < end) key = sort_key<kFirst>(a, item), came = kFirst ? item : a.from[item];
  };
  load(begin + lane);
  for (uint32_t first = begin; first < end; first += kWarp) {
    const bool inside = first + lane < end;
    const uint32_t moved = key, from = came;
    load(first + kWarp + lane);  // on its way while these find their places
    const uint32_t mine = inside ? moved >> a.shift & (kDigits - 1) : kDigits;
    const uint32_t same = __match_any_sync(kAllLanes, mine);
    const uint32_t rank = __popc(same & ((1u << lane) - 1));
    if (inside) {
      const uint32_t to = next[warp][mine] + rank;
      a.keys_out[to] = moved;
      a.from_out[to] = from;
    }
    __syncwarp();
    if (inside && rank == 0) next[warp][mine] += __popc(same);
    __syncwarp();
  }
}

struct Sorted {
  const uint32_t* keys;  // ascending; `rows` for items that have no row
  const uint32_t* from;
};

inline int64_t sort_words(int64_t count) { return 4 * divide_up(count, 4) * 4 + int64_t(kMostTiles) * kDigits; }

// Sorts `count` ids (under 2^32) into `words`, which has room for sort_words(count).
inline int run_sort(const int64_t* ids, int64_t period, int64_t skipped, int64_t count, int64_t rows, uint32_t* words,
                    Sorted& sorted, void* stream) {
  const int64_t room = divide_up(count, 4) * 4;
  uint32_t* const buffers[4] = {words, words + room, words + 2 * room, words + 3 * room};
  SortPass a{};
  a.ids = ids, a.period = period, a.skipped = skipped;
  a.count = uint32_t(count), a.rows = uint32_t(rows), a.counts = words + 4 * room;
  a.tile = uint32_t(divide_up(divide_up(count, kMostTiles), kSortBlock) * kSortBlock);
  a.tiles = uint32_t(divide_up(count, a.tile));
  int bits = 1;
  while (bits < 32 && rows >> bits) ++bits;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  for (int pass = 0; 8 * pass < bits; ++pass) {
    const int to = pass % 2;
    a.keys = buffers[2 - 2 * to], a.from = buffers[3 - 2 * to];
    a.keys_out = buffers[2 * to], a.from_out = buffers[2 * to + 1];
    a.shift = 8 * pass;
    if (pass == 0) {
      sort_count<true><<<a.tiles, kSortBlock, 0, on>>>(a);
      sort_move<true><<<a.tiles, kSortBlock, 0, on>>>(a);
    } else {
      sort_count<false><<<a.tiles, kSortBlock, 0, on>>>(a);
      sort_move<false><<<a.tiles, kSortBlock, 0, on>>>(a);
    }
  }
  sorted = {a.keys_out, a.from_out};
  return int(cudaGetLastError());
}

}  // namespace fuseline
