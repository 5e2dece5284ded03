// The rows of a table's gradient, a bin of neighbouring rows and a slice of their columns to a block.
//
// A block lists the items whose ids are in its bin, in order: from the tiles of embedding_bins.cuh, or of few ids by looking
// through them all, which is one launch in all. It sorts the list by row (stable), and its threads add up the columns
// of one access over windows of equal numbers of sorted items, in fp32: a sum that crosses windows is joined in shared
// memory, in order. So each row of the gradient is written once, zeros where no id names it, or added to once where it is. A bin of more items than a
// block lists has further blocks, and the last of them to come joins what they leave. No atomics on floats.
#pragma once

#include "embedding.cuh"
#include "embedding_bins.cuh"

namespace fuseline {

// Of a multiprocessor; before sm_90 code for four spills a mask's words.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kSumsAtOnce = 3;
#else
constexpr int kSumsAtOnce = 4;
#endif
constexpr int kItemsAhead = 4;  // loaded before the first is added; 8 are 3% slower
constexpr uint32_t kNoRow = 0xffffu;

// Blocks of a multiprocessor: of fp16 one fewer, whose conversions take registers that spilled 12 bytes.
template <class T>
constexpr int sums_at_once() {
  return std::is_same_v<T, __half> ? kSumsAtOnce - 1 : kSumsAtOnce;
}

struct SummedTable {
  const int64_t* ids;  // item i's is ids[i % period]
  int64_t period, skipped;
  void* result;
  uint32_t rows, bins, bin_rows;
  bool adds;  // to what is in `result`
};

struct RowSums {
  const void* grad_out;
  SummedTable table;
  // Of many items:
  const uint32_t* entries;
  const uint16_t* starts;
  const uint32_t* totals;
  uint32_t* arrived;   // [further, slices], at a bin's first; zero before
  float* partials;     // [2 * further, bin_rows, n]
  uint32_t tile, tiles, further;  // blocks for bins that want more than one
  uint32_t items, capacity;       // of a block's list, a multiple of kWarp
  int64_t n;
  Divisor slices, slice;  // slices of a row, accesses of a slice
  Dropout dropout;
};

template <int kWide>
__device__ __forceinline__ void store_sums(float* at, const float (&sums)[kWide]) {
  if constexpr (kWide == 1) {
    *at = sums[0];
  } else {
#pragma unroll
    for (int i = 0; i < kWide; i += 4) {
      *reinterpret_cast<float4*>(at + i) = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
    }
  }
}

template <int kWide>
__device__ __forceinline__ void add_sums(const float* at, float (&sums)[kWide]) {
  if constexpr (kWide == 1) {
    sums[0] += *at;
  } else {
#pragma unroll
    for (int i = 0; i < kWide; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(at + i);
      sums[i] += four.x, sums[i + 1] += four.y, sums[i + 2] += four.z, sums[i + 3] += four.w;
    }
  }
}

// Which bin a further block helps with, and which of all further blocks is the bin's first; or that of a bin.
struct Share {
  uint32_t bin, first, found;
};

__device__ __forceinline__ void find_share(const RowSums& a, bool of_bin, uint32_t wanted, Share& share,
                                           uint32_t (&of_warp)[kSumWarps]) {
  const uint32_t bins = a.table.bins, each = (bins + kSumBlock - 1) / kSumBlock;
  const uint32_t begin = threadIdx.x * each, end = min(begin + each, bins);
  const auto further = [&](uint32_t bin) { return a.totals[bin] ? (a.totals[bin] - 1) / a.capacity : 0; };
  uint32_t count = 0, all;
  for (uint32_t bin = begin; bin < end; ++bin) count += further(bin);
  if (threadIdx.x == 0) share.found = 0;
  uint32_t before = sum_before(count, of_warp, all);
  for (uint32_t bin = begin; bin < end; ++bin) {
    count = further(bin);
    if (of_bin ? bin == wanted : wanted - before < count) share = {bin, before, 1};
    before += count;
  }
  __syncthreads();
}

template <class T, int kWide, bool kBinned>
__global__ void __launch_bounds__(kSumBlock, sums_at_once<T>()) embedding_row_sums(const RowSums a) {
  let_next_start();
  wait_for_earlier();
  extern __shared__ uint4 sums_shared[];
  __shared__ uint32_t of_warp[kSumWarps];
  uint32_t bin = a.slices.divide(blockIdx.x);
  const uint32_t slice = blockIdx.x - bin * a.slices.value;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const SummedTable& table = a.table;
  const uint32_t bin_rows = table.bin_rows;

  uint32_t* const sorted_items = reinterpret_cast<uint32_t*>(sums_shared);
  uint16_t* const sorted_rows = reinterpret_cast<uint16_t*>(sorted_items + a.capacity);
  float* const sums_kept = reinterpret_cast<float*>(sorted_rows + a.capacity);  // in the place of the list, once sorted
  uint32_t* const items = reinterpret_cast<uint32_t*>(sums_kept);               // of the list; of few item i is at i
  uint16_t* const rows = reinterpret_cast<uint16_t*>(items + (kBinned ? a.capacity : 0));
  const uint32_t kept = max(a.capacity * (kBinned ? 6u : 2u), uint32_t(2 * kSumBlock * kWide * 4));
  uint32_t* const starts = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(sums_kept) + (kept + 15) / 16 * 16);
  uint32_t* const counted = starts + bin_rows + 1;  // [kSumWarps, bin_rows]
  for (uint32_t i = threadIdx.x; i < (kSumWarps + 1) * bin_rows + 1; i += kSumBlock) starts[i] = 0;

  // The list.
  uint32_t count = a.items;   // of the list
  uint32_t slot = 0, shares = 1, shares_first = 0;
  bool any = true;
  if constexpr (!kBinned) {
    const int64_t row0 = int64_t(bin) * bin_rows;
    any = false;
#pragma unroll 4
    for (uint32_t item = threadIdx.x; item < count; item += kSumBlock) {
      const uint32_t at = table.period >= count ? item : item % uint32_t(table.period);
      const int64_t id = __ldg(table.ids + at);
      const bool mine = id >= row0 && id < row0 + bin_rows && id < int64_t(table.rows) && id != table.skipped;
      rows[item] = uint16_t(mine ? uint32_t(id - row0) : kNoRow);
      any = any || mine;
    }
    any = __syncthreads_or(any);
  } else {
    __shared__ uint32_t segments[kSumBlock];
    __shared__ Share found;
    uint32_t share = 0, total = 0, running = 0;
    if (bin >= table.bins) {
      find_share(a, false, bin - table.bins, found, of_warp);
      if (!found.found) return;
      share = bin - table.bins - found.first + 1;
      slot = bin - table.bins, shares_first = found.first, bin = found.bin;
    }
    const uint32_t share_begin = share * a.capacity;
    for (uint32_t chunk = 0; chunk < a.tiles; chunk += kSumBlock) {
      const uint32_t tile = chunk + threadIdx.x, tiles = min(uint32_t(kSumBlock), a.tiles - chunk);
      uint32_t begin = 0, end = 0, here;
      if (tile < a.tiles) {
        begin = a.starts[size_t(bin) * a.tiles + tile], end = a.starts[size_t(bin + 1) * a.tiles + tile];
      }
      __syncthreads();
      const uint32_t before = running + sum_before(end - begin, of_warp, here);
      segments[threadIdx.x] = before;
      uint32_t* const offsets = sorted_items;  // free until the list is sorted
      offsets[threadIdx.x] = tile * a.tile + begin - before;
      __syncthreads();
      const uint32_t from = max(running, share_begin), to = min(running + here, share_begin + a.capacity);
      for (uint32_t k0 = from + threadIdx.x; k0 < to; k0 += kItemsAhead * kSumBlock) {
        uint32_t tile_of[kItemsAhead], entry[kItemsAhead];
#pragma unroll
        for (int u = 0; u < kItemsAhead; ++u) {
          const uint32_t k = k0 + u * kSumBlock;
          uint32_t t = 0;
#pragma unroll
          for (uint32_t step = kSumBlock / 2; step; step /= 2) {
            if (t + step < tiles && segments[t + step] <= k) t += step;
          }
          tile_of[u] = chunk + t;
          if (k < to) entry[u] = a.entries[offsets[t] + k];
        }
#pragma unroll
        for (int u = 0; u < kItemsAhead; ++u) {
          const uint32_t k = k0 + u * kSumBlock;
          if (k >= to) continue;
          items[k - share_begin] = tile_of[u] * a.tile + (entry[u] & (kMostTile - 1));
          rows[k - share_begin] = uint16_t(entry[u] >> kTileBits);
        }
      }
      running += here;
      __syncthreads();
    }
    total = running;
    count = min(total - share_begin, a.capacity);
    shares = total ? (total - 1) / a.capacity + 1 : 1;
    if (shares > 1 && share == 0) {
      find_share(a, true, bin, found, of_warp);
      shares_first = found.first, slot = a.further + found.first;
    }
    __syncthreads();
  }
  const int64_t row0 = int64_t(bin) * bin_rows;
  const uint32_t bin_end = uint32_t(min(int64_t(bin_rows), int64_t(table.rows) - row0));

  // The list by rows.
  uint32_t hits = 0;
  if (any) {
    const uint32_t stretch = (count + kSumBlock - 1) / kSumBlock * kWarp;
    const uint32_t begin = warp * stretch, end = min(begin + stretch, count);
    uint32_t* const mine = counted + warp * bin_rows;
    for (uint32_t item = begin + lane; item < end; item += kWarp) {
      if (rows[item] != kNoRow) atomicAdd(mine + rows[item], 1u);
    }
    __syncthreads();
    uint32_t of_row = 0;
    if (threadIdx.x < bin_rows) {
      for (int w = 0; w < kSumWarps; ++w) of_row += counted[w * bin_rows + threadIdx.x];
    }
    uint32_t place = sum_before(of_row, of_warp, hits);
    if (threadIdx.x < bin_rows) {
      starts[threadIdx.x] = place;
      if (threadIdx.x == bin_rows - 1) starts[bin_rows] = hits;
      for (int w = 0; w < kSumWarps; ++w) {
        of_row = counted[w * bin_rows + threadIdx.x];
        counted[w * bin_rows + threadIdx.x] = place;
        place += of_row;
      }
    }
    __syncthreads();
    for (uint32_t first = begin; first < end; first += kWarp) {
      const uint32_t item = first + lane, row = item < end ? rows[item] : kNoRow;
      if (!__any_sync(kAllLanes, row != kNoRow)) continue;
      const uint32_t same = __match_any_sync(kAllLanes, row);
      const uint32_t rank = __popc(same & ((1u << lane) - 1));
      if (row != kNoRow) {
        const uint32_t to = mine[row] + rank;
        sorted_items[to] = kBinned ? items[item] : item;
        sorted_rows[to] = uint16_t(row);
      }
      __syncwarp();
      if (row != kNoRow && rank == 0) mine[row] += __popc(same);
      __syncwarp();
    }
    __syncthreads();
  }

  T* const result = static_cast<T*>(table.result) + row0 * a.n;
  float* const partial = a.partials + int64_t(slot) * bin_rows * a.n;
  const auto write = [&](uint32_t row, int64_t first, const float(&sums)[kWide]) {
    T* const at = result + row * a.n + first;
    float all[kWide] = {};
    if (table.adds) widen<T, kWide>(load_wide<T, kWide>(at), all);
#pragma unroll
    for (int i = 0; i < kWide; ++i) all[i] += sums[i];
    store_wide<T, kWide>(at, all);
  };
  const bool joined = kBinned && shares > 1;
  const auto emit = [&](uint32_t row, int64_t first, const float(&sums)[kWide]) {
    if (joined) {
      store_sums(partial + row * a.n + first, sums);
    } else {
      write(row, first, sums);
    }
  };
  const int64_t slice_first = int64_t(slice) * a.slice.value;
  if (any) {
    const uint32_t group = a.slice.divide(threadIdx.x), groups = a.slice.divide(kSumBlock);
    const int64_t first = (slice_first + threadIdx.x - group * a.slice.value) * kWide;
    const uint32_t window = max(1u, (hits + groups - 1) / groups);
    const uint32_t begin = group * window, end = min(begin + window, hits);
    const bool active = group < groups && first < a.n && begin < end;
    float* const heads = sums_kept + threadIdx.x * kWide;
    float* const tails = heads + kSumBlock * kWide;
    const uint64_t seed = seed_of(a.dropout);
    if (active) {
      uint32_t current = sorted_rows[begin];
      bool began_before = begin > 0 && sorted_rows[begin - 1] == current;
      float sums[kWide] = {};
      const auto flush = [&](bool goes_on) {
        if (began_before) {
          store_sums(heads, sums);
        } else if (goes_on) {
          store_sums(tails, sums);
        } else {
          emit(current, first, sums);
        }
      };
      for (uint32_t item = begin; item < end; item += kItemsAhead) {
        uint32_t from[kItemsAhead];
        Raw<T, kWide> raw[kItemsAhead];
#pragma unroll
        for (int u = 0; u < kItemsAhead; ++u) {
          if (item + u >= end) continue;
          from[u] = sorted_items[item + u];
          raw[u] = load_wide<T, kWide>(static_cast<const T*>(a.grad_out) + int64_t(from[u]) * a.n + first);
        }
#pragma unroll
        for (int u = 0; u < kItemsAhead; ++u) {
          if (item + u >= end) continue;
          const uint32_t row = sorted_rows[item + u];
          if (row != current) {
            flush(false);
            current = row, began_before = false;
#pragma unroll
            for (int i = 0; i < kWide; ++i) sums[i] = 0.f;
          }
          float grad[kWide], multiplier[kWide];
          widen<T, kWide>(raw[u], grad);
          multipliers(a.dropout, seed, int64_t(from[u]) * a.n + first, multiplier);
#pragma unroll
          for (int i = 0; i < kWide; ++i) sums[i] = fmaf(grad[i], multiplier[i], sums[i]);
        }
      }
      flush(end < hits && sorted_rows[end] == current);
    }
    __syncthreads();
    const uint32_t last = active ? sorted_rows[end - 1] : kNoRow;
    if (active && end < hits && sorted_rows[end] == last && !(begin > 0 && sorted_rows[begin - 1] == last)) {
      float sums[kWide] = {};
      add_sums(tails, sums);
      for (uint32_t next = 1; group + next < groups; ++next) {
        const uint32_t at = begin + next * window;
        if (at >= hits || sorted_rows[at] != last) break;
        add_sums(heads + next * a.slice.value * kWide, sums);
      }
      emit(last, first, sums);
    }
  }
  const float none[kWide] = {};
  const uint32_t unnamed = table.adds && !joined ? 0 : bin_end;  // rows to look through for those that no id names
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < unnamed * a.slice.value; i += kSumBlock) {
    const uint32_t row = a.slice.divide(i);
    const int64_t first = (slice_first + i - row * a.slice.value) * kWide;
    if (first >= a.n || starts[row] != starts[row + 1]) continue;
    if (joined) {
      store_sums(partial + row * a.n + first, none);
    } else {
      store_wide<T, kWide>(result + row * a.n + first, none);
    }
  }

  if constexpr (kBinned) {
    if (shares == 1) return;
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(a.arrived + shares_first * a.slices.value + slice, 1u) == shares - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (uint32_t i = threadIdx.x; i < bin_end * a.slice.value; i += kSumBlock) {
      const uint32_t row = a.slice.divide(i);
      const int64_t first = (slice_first + i - row * a.slice.value) * kWide;
      if (first >= a.n) continue;
      float sums[kWide] = {};
      for (uint32_t share = 0; share < shares; ++share) {
        const int64_t of = share == 0 ? a.further + shares_first : shares_first + share - 1;
        add_sums(a.partials + (of * bin_rows + row) * a.n + first, sums);
      }
      write(row, first, sums);
    }
  }
}

}  // namespace fuseline
