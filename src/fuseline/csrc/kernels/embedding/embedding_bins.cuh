// Many ids of an embedding put into bins, each of neighbouring rows of the table.
//
// One launch: a block sorts a tile of the ids by bin in shared memory (stable) and writes it, with where each bin begins in
// it. Who adds up a bin takes its part of every tile, so that nothing is counted over tiles and nothing written in pieces.
#pragma once

#include "device/elementwise.cuh"
#include "prefix.cuh"

namespace fuseline {

constexpr int kTileBits = 14;
static_assert(kMostTile == 1 << kTileBits && kMostBins == 1 << 11 && kMostBinRows <= 256);

struct Bins {
  // Item i's is ids[i % period]; those outside the `rows` from first_row on, and `skipped`, are in no bin.
  const int64_t* ids;
  int64_t period, skipped, first_row;
  uint32_t* entries;   // [tiles, tile]: row within the bin << kTileBits | item within the tile
  uint16_t* starts;    // [bins + 1, tiles]: where each bin begins in a tile
  uint32_t* totals;    // [bins]: items of each; zero before
  uint32_t items, rows, tile, tiles, bins;
  Divisor bin_rows;
};

__global__ void __launch_bounds__(kBinBlock) embedding_bin_ids(const Bins a) {
  let_next_start();
  wait_for_earlier();
  extern __shared__ uint32_t tile_shared[];
  __shared__ uint32_t of_warp[kBinWarps];
  const uint32_t pairs = (a.bins + 1) / 2;
  uint32_t* const sorted = tile_shared;
  uint32_t* const base = sorted + a.tile;                          // of each bin in the tile
  uint32_t* const counted = base + 2 * pairs;                      // [kBinWarps, pairs], two bins in a word
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t begin = blockIdx.x * a.tile, left = a.items - begin, stretch = a.tile / kBinWarps;
  int64_t ids[kOfThread];
#pragma unroll
  for (int u = 0; u < kOfThread; ++u) {
    const uint32_t within = warp * stretch + u * kWarp + lane, item = begin + within;
    ids[u] = -1;
    if (u * kWarp >= stretch || within >= left) continue;
    ids[u] = __ldg(a.ids + (a.period >= a.items ? item : item % uint32_t(a.period)));
  }
  for (uint32_t i = threadIdx.x; i < kBinWarps * pairs; i += kBinBlock) counted[i] = 0;
  __syncthreads();

  // Of each id: its place among the bin's ids of this warp << 19 | bin << 8 | row within the bin.
  uint16_t* const mine = reinterpret_cast<uint16_t*>(counted + warp * pairs);
  uint32_t places[kOfThread];
#pragma unroll
  for (int u = 0; u < kOfThread; ++u) {
    places[u] = 0xffffffffu;
    if (u * kWarp >= stretch) continue;
    const bool has = ids[u] >= a.first_row && ids[u] - a.first_row < int64_t(a.rows) && ids[u] != a.skipped;
    const uint32_t row = uint32_t(ids[u] - a.first_row), bin = has ? a.bin_rows.divide(row) : 0xffffffffu;
    const uint32_t same = __match_any_sync(kAllLanes, bin);
    const uint32_t rank = __popc(same & ((1u << lane) - 1));
    const uint32_t before = has ? mine[bin] : 0;
    __syncwarp();
    if (has && rank == 0) mine[bin] = uint16_t(before + __popc(same));
    __syncwarp();
    if (has) places[u] = (before + rank) << 19 | bin << 8 | (row - bin * a.bin_rows.value);
  }
  __syncthreads();
  uint32_t both = 0;
  if (threadIdx.x < pairs) {
#pragma unroll 8
    for (int w = 0; w < kBinWarps; ++w) {
      const uint32_t of = counted[w * pairs + threadIdx.x];
      counted[w * pairs + threadIdx.x] = both;
      both += of;
    }
  }
  const uint32_t low = both & 0xffff, high = both >> 16;
  uint32_t in_tile;
  const uint32_t first = sum_before(low + high, of_warp, in_tile);
  const uint32_t bin = 2 * threadIdx.x;
  if (bin < a.bins) {
    base[bin] = first, base[bin + 1] = first + low;
    a.starts[size_t(bin) * a.tiles + blockIdx.x] = uint16_t(first);
    if (low) atomicAdd(a.totals + bin, low);
    if (bin + 1 < a.bins) {
      a.starts[size_t(bin + 1) * a.tiles + blockIdx.x] = uint16_t(first + low);
      if (high) atomicAdd(a.totals + bin + 1, high);
    }
  }
  if (threadIdx.x == 0) a.starts[size_t(a.bins) * a.tiles + blockIdx.x] = uint16_t(in_tile);
  __syncthreads();
#pragma unroll
  for (int u = 0; u < kOfThread; ++u) {
    if (places[u] == 0xffffffffu) continue;
    const uint32_t of = places[u] >> 8 & (kMostBins - 1);
    const uint32_t within = warp * stretch + u * kWarp + lane;
    sorted[base[of] + mine[of] + (places[u] >> 19)] = (places[u] & 255) << kTileBits | within;
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < in_tile; i += kBinBlock) a.entries[size_t(begin) + i] = sorted[i];
}

}  // namespace fuseline
