// The gradients of the tables of y = dropout(table[token] + position_table[position]).
//
// Moves: grad_out read once for each table, in the order of the ids, and the gradient written, of a small table the rows
// of ids twice. Limit: HBM bandwidth, for few tokens the launches.
//
// Threads: the ids are sorted (radix_sort.cuh, stable), so that what goes to one row of the table stands together; a thread
// then adds up the columns of one access over a window of items in a row, in fp32, and writes each sum that begins and ends
// there. Sums that cross windows are left as fp32 rows, and a second kernel adds those up in order. No atomics on floats:
// the same bits each run, however often an id comes. Without ids the positions repeat, and a thread adds up the rows of one
// position.

#include "device/embedding.cuh"
#include "device/embedding_few.cuh"
#include "device/embedding_sums.cuh"
#include "device/radix_sort.cuh"

#include <cstdlib>

namespace fuseline {
namespace {

constexpr int kFewInWindow = 32, kManyInWindow = 64;  // sorted items of a thread
constexpr int64_t kManyElements = 1 << 26;            // of grad_out, from which the larger windows fill the chip
constexpr int kAhead = 4;                             // items loaded before the first is added
constexpr int64_t kLargeTable = 64 << 20;             // bytes from which only rows without an id are set to zero
constexpr int kZeroRows = 8;                          // of a warp

struct TableGradient {
  const void* grad_out;
  const uint32_t* keys;
  const uint32_t* from;
  void* result;
  float* heads;  // [windows, n]: what a window adds to a sum that began before it
  float* tails;  // [windows, n]: what it adds to one that begins in it and goes on
  uint32_t items, windows, window, rows;
  int64_t n;
  Dropout dropout;
  Divisor columns;  // accesses in a row
};

constexpr uint32_t kNoKey = 0xffffffffu;

template <class T, int kWide>
__global__ void __launch_bounds__(kElementwiseBlock, 3) embedding_window_sums(const TableGradient a) {
  const uint32_t thread = blockIdx.x * uint32_t(kElementwiseBlock) + threadIdx.x;
  const uint32_t window = a.columns.divide(thread);
  if (window >= a.windows) return;
  const int64_t first = int64_t(thread - window * a.columns.value) * kWide;
  const uint32_t begin = window * a.window, end = min(begin + a.window, a.items);
  const uint64_t seed = seed_of(a.dropout);
  const uint32_t after = end < a.items ? a.keys[end] : kNoKey;
  uint32_t current = a.keys[begin];
  bool began_before = begin > 0 && a.keys[begin - 1] == current;
  float sums[kWide] = {};
  const auto flush = [&](bool goes_on) {
    if (current >= a.rows) return;
    if (began_before) {
      store_sums(a.heads + int64_t(window) * a.n + first, sums);
    } else if (goes_on) {
      store_sums(a.tails + int64_t(window) * a.n + first, sums);
    } else {
      store_wide<T, kWide>(static_cast<T*>(a.result) + int64_t(current) * a.n + first, sums);
    }
  };
  uint32_t next_keys[kAhead], next_from[kAhead];
  const auto load_ids = [&](uint32_t item) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const bool inside = item + u < end;
      next_keys[u] = inside ? a.keys[item + u] : kNoKey;
      next_from[u] = inside ? a.from[item + u] : 0;
    }
  };
  load_ids(begin);
  for (uint32_t item = begin; item < end; item += kAhead) {
    uint32_t keys[kAhead], from[kAhead];
    Raw<T, kWide> raw[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      keys[u] = next_keys[u], from[u] = next_from[u];
      const T* row = static_cast<const T*>(a.grad_out) + int64_t(from[u]) * a.n + first;
      if (keys[u] < a.rows) raw[u] = load_wide<T, kWide>(row);
    }
    load_ids(item + kAhead);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (item + u >= end) continue;
      if (keys[u] != current) {
        flush(false);
        current = keys[u], began_before = false;
#pragma unroll
        for (int i = 0; i < kWide; ++i) sums[i] = 0.f;
      }
      if (current >= a.rows) continue;
      float grad[kWide], multiplier[kWide];
      widen<T, kWide>(raw[u], grad);
      multipliers(a.dropout, seed, int64_t(from[u]) * a.n + first, multiplier);
#pragma unroll
      for (int i = 0; i < kWide; ++i) sums[i] = fmaf(grad[i], multiplier[i], sums[i]);
    }
  }
  flush(after == current);
}

// The sums that cross windows: the thread of the window where one begins adds up its windows in order.
template <class T, int kWide>
__global__ void __launch_bounds__(kElementwiseBlock) embedding_join_windows(const TableGradient a) {
  const uint32_t thread = blockIdx.x * uint32_t(kElementwiseBlock) + threadIdx.x;
  const uint32_t window = a.columns.divide(thread);
  if (window + 1 >= a.windows) return;
  const int64_t first = int64_t(thread - window * a.columns.value) * kWide;
  const uint32_t begin = window * a.window, end = begin + a.window;
  const uint32_t key = a.keys[end - 1];
  if (key >= a.rows || a.keys[end] != key || (begin > 0 && a.keys[begin - 1] == key)) return;
  float sums[kWide] = {};
  add_sums(a.tails + int64_t(window) * a.n + first, sums);
  bool goes_on = true;
  for (uint32_t next = window + 1; goes_on; next += kAhead) {
    // Whether the sum reaches into each window.
    bool reaches[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) reaches[u] = next + u < a.windows && a.keys[(next + u) * a.window] == key;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (reaches[u]) add_sums(a.heads + int64_t(next + u) * a.n + first, sums);
    }
    goes_on = reaches[kAhead - 1];
  }
  store_wide<T, kWide>(static_cast<T*>(a.result) + int64_t(key) * a.n + first, sums);
}

// Zeros for the rows that no id names. Lane i of a warp looks up where the ids from row i of its kZeroRows on begin.
template <class T, int kWide>
__global__ void __launch_bounds__(kElementwiseBlock) embedding_zero_rows(const TableGradient a) {
  const int64_t warp = (int64_t(blockIdx.x) * kElementwiseBlock + threadIdx.x) / kWarp;
  const int lane = int(threadIdx.x) % kWarp;
  const int64_t begin = warp * kZeroRows, wanted = begin + min(lane, kZeroRows);
  uint32_t low = 0, high = begin < a.rows ? a.items : 0;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (int64_t(a.keys[middle]) < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const float zeros[kWide] = {};
#pragma unroll
  for (int i = 0; i < kZeroRows; ++i) {
    const bool named = __shfl_sync(kAllLanes, low, i) < __shfl_sync(kAllLanes, low, i + 1);
    if (named || begin + i >= a.rows) continue;
    T* const row = static_cast<T*>(a.result) + (begin + i) * a.n;
    for (int64_t c = lane * kWide; c < a.n; c += kWarp * kWide) store_wide<T, kWide>(row + c, zeros);
  }
}

struct PositionGradient {
  const void* grad_out;
  void* result;
  int64_t items, period, n;
  Dropout dropout;
  Divisor columns;
};

template <class T, int kWide>
__global__ void __launch_bounds__(kElementwiseBlock) embedding_position_sums(const PositionGradient a) {
  const uint32_t thread = blockIdx.x * uint32_t(kElementwiseBlock) + threadIdx.x;
  const uint32_t position = a.columns.divide(thread);
  if (position >= a.period) return;
  const int64_t first = int64_t(thread - position * a.columns.value) * kWide;
  const uint64_t seed = seed_of(a.dropout);
  float sums[kWide] = {};
  for (int64_t item = position; item < a.items; item += kAhead * a.period) {
    Raw<T, kWide> raw[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t at = item + u * a.period;
      if (at < a.items) raw[u] = load_wide<T, kWide>(static_cast<const T*>(a.grad_out) + at * a.n + first);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t at = item + u * a.period;
      if (at >= a.items) continue;
      float grad[kWide], multiplier[kWide];
      widen<T, kWide>(raw[u], grad);
      multipliers(a.dropout, seed, at * a.n + first, multiplier);
#pragma unroll
      for (int i = 0; i < kWide; ++i) sums[i] = fmaf(grad[i], multiplier[i], sums[i]);
    }
  }
  store_wide<T, kWide>(static_cast<T*>(a.result) + int64_t(position) * a.n + first, sums);
}

// ---- launchers ----

int zero(void* at, int64_t elements, int dtype, void* stream) {
  const size_t bytes = size_t(elements) * (dtype == FUSELINE_FLOAT32 ? 4 : 2);
  return int(cudaMemsetAsync(at, 0, bytes, static_cast<cudaStream_t>(stream)));
}

int64_t window_of(int64_t items, int64_t n) { return items * n >= kManyElements ? kManyInWindow : kFewInWindow; }

unsigned blocks_for(int64_t threads) { return unsigned(divide_up(threads, kElementwiseBlock)); }


size_t old_workspace(int64_t items, int64_t n) {
  if (items <= 0 || n <= 0) return 0;
  const int64_t partials = 2 * divide_up(items, window_of(items, n)) * n;
  return size_t(sort_words(items) + partials) * 4;
}

int sum_sorted(const void* grad_out, const int64_t* ids, int64_t period, int64_t skipped,
                                void* grad_table, void* workspace, int64_t items, int64_t n, int64_t rows,
                                const int64_t* seed, double p, int dtype, void* stream) {
  if (items < 0 || n < 0 || rows < 0 || period < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype)) return FUSELINE_UNSUPPORTED;
  if (too_many(items, n) || rows >= 0xffffffffll) return int(cudaErrorInvalidConfiguration);
  if (n == 0 || rows == 0) return 0;
  const bool large = rows * n * (dtype == FUSELINE_FLOAT32 ? 4 : 2) >= kLargeTable && items > 0;
  int code = large ? 0 : zero(grad_table, rows * n, dtype, stream);
  if (code || items == 0) return code;
  Sorted sorted{};
  uint32_t* const words = static_cast<uint32_t*>(workspace);
  code = run_sort(ids, period, skipped, items, rows, words, sorted, stream);
  if (code) return code;
  TableGradient a{};
  a.grad_out = grad_out, a.keys = sorted.keys, a.from = sorted.from, a.result = grad_table;
  a.items = uint32_t(items), a.rows = uint32_t(rows), a.n = n;
  a.window = uint32_t(window_of(items, n)), a.windows = uint32_t(divide_up(items, a.window));
  a.heads = reinterpret_cast<float*>(words + sort_words(items)), a.tails = a.heads + a.windows * n;
  a.dropout = dropout_of(seed, p);
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_width<T>(n, {grad_out, grad_table}, [&](auto wide) {
      constexpr int kWide = decltype(wide)::value;
      a.columns = Divisor(uint32_t(n / kWide));
      const unsigned blocks = blocks_for(int64_t(a.windows) * a.columns.value);
      const cudaStream_t on = static_cast<cudaStream_t>(stream);
      const unsigned zero_blocks = blocks_for(divide_up(rows, kZeroRows) * kWarp);
      if (large) embedding_zero_rows<T, kWide><<<zero_blocks, kElementwiseBlock, 0, on>>>(a);
      embedding_window_sums<T, kWide><<<blocks, kElementwiseBlock, 0, on>>>(a);
      if (a.windows > 1) embedding_join_windows<T, kWide><<<blocks, kElementwiseBlock, 0, on>>>(a);
      return int(cudaGetLastError());
    });
  });
}

int64_t trial(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoll(value) : otherwise;
}

constexpr int64_t kFewItems = 2048;      // so many ids a block looks through itself
int64_t listed() { return trial("FUSELINE_E_LIST", 3072); }  // items of a block's list, of many
constexpr int64_t kMostSlice = 128;      // accesses
constexpr int64_t kBlocksAtOnce = 4;     // of a multiprocessor

bool few_items(int64_t items) { return items <= trial("FUSELINE_E_FEW", kFewItems); }

// Accesses of a slice of a row: so many that nearly all threads of a block have one.
int64_t slice_of(int64_t accesses) {
  if (const int64_t given = trial("FUSELINE_E_SLICE", 0)) return std::min(given, accesses);
  int64_t best = 1, most_used = 0;
  for (int64_t slices = divide_up(accesses, kMostSlice); slices <= accesses; ++slices) {
    const int64_t slice = divide_up(accesses, slices);
    if (slice < 16 && most_used > 0) break;
    const int64_t used = (kSumBlock / slice * slice) * 1024 / kSumBlock * accesses / (slices * slice);
    if (used > most_used) best = slice, most_used = used;
    if (used >= 900) break;
  }
  return best;
}

struct BinPlan {
  int64_t tile, tiles, bins, bin_rows, further;
};

BinPlan plan_bins(int64_t items, int64_t rows, int64_t slices) {
  BinPlan plan{};
  plan.tile = trial("FUSELINE_E_TILE", std::min<int64_t>(kMostTile, divide_up(divide_up(items, 128), kBinBlock) * kBinBlock));
  plan.tiles = divide_up(items, plan.tile);
  const int64_t wanted = trial("FUSELINE_E_BINS", std::max(divide_up(items, 2048), divide_up(1056, slices)));
  plan.bin_rows = std::min<int64_t>(kMostBinRows, divide_up(rows, std::min<int64_t>(wanted, kMostBins)));
  plan.bins = divide_up(rows, plan.bin_rows);
  plan.further = items / listed();
  return plan;
}

bool can_bin(int64_t rows) { return rows <= int64_t(kMostBins) * kMostBinRows && !trial("FUSELINE_E_OLD", 0); }

// Parts of the workspace of binned items, in bytes.
struct BinSpace {
  size_t totals, arrived, partials, starts, entries, end;
};

BinSpace bin_space(const BinPlan& plan, int64_t slices, int64_t n) {
  BinSpace at{};
  at.arrived = size_t(plan.bins) * 4;
  at.partials = divide_up(at.arrived + size_t(plan.bins * slices) * 4, 16) * 16;
  at.starts = at.partials + size_t(2 * plan.further * plan.bin_rows * n) * 4;
  at.entries = at.starts + divide_up((plan.bins + 1) * plan.tiles * 2, 16) * 16;
  at.end = at.entries + size_t(plan.tiles * plan.tile) * 4;
  return at;
}

template <class T, int kWide>
int run_few(RowSums& a, const Device& device, void* stream) {
  const int64_t accesses = a.n / kWide, slice = slice_of(accesses), slices = divide_up(accesses, slice);
  a.slice = Divisor(uint32_t(slice)), a.slices = Divisor(uint32_t(slices));
  SummedTable& table = a.table;
  const int64_t bins = std::max<int64_t>(1, device.processors * kBlocksAtOnce / slices);
  const int64_t least = std::max<int64_t>(divide_up(table.rows, bins), divide_up(kSumBlock / 2, slice));
  table.bin_rows = uint32_t(std::min<int64_t>({trial("FUSELINE_E_ROWS", least), kMostBinRows, int64_t(table.rows)}));
  table.bins = uint32_t(divide_up(table.rows, table.bin_rows));
  a.capacity = uint32_t(divide_up(a.items, kWarp) * kWarp);
  a.zeros_first = int(trial("FUSELINE_E_ZF", 0));
  const size_t shared = sum_shared<kWide>(false, a.capacity, table.bin_rows);
  const auto kernel = embedding_row_sums<T, kWide, false>;
  int resident = 0;
  const cudaError_t error = resident_clusters(kernel, device, kSumBlock, shared, 1, resident);
  if (error != cudaSuccess) return int(error);
  return launch(kernel, a, table.bins * slices, dim3(kSumBlock), shared, 1, stream, device.clusters);
}

template <class T, int kWide>
int run_warps(const RowSums& given, const Device& device, void* stream) {
  FewSums a{};
  const SummedTable& table = given.table;
  a.grad_out = given.grad_out, a.ids = table.ids, a.period = table.period, a.skipped = table.skipped;
  a.result = table.result, a.items = given.items, a.rows = table.rows, a.n = given.n, a.dropout = given.dropout;
  const int64_t accesses = a.n / kWide, at_once = int64_t(device.processors) * 3 * kFewWarps;
  // Slices as long as leave every warp one, between 1 and 8 accesses a lane.
  int64_t slice = 8 * kWarp;
  while (slice > kWarp && table.rows * divide_up(accesses, slice) < at_once) slice /= 2;
  slice = trial("FUSELINE_E_SLICE", slice);
  const int64_t slices = divide_up(accesses, slice), tasks = slices * table.rows;
  if (tasks > 0x7fffffff) return int(cudaErrorInvalidConfiguration);
  a.accesses = uint32_t(accesses), a.slice = uint32_t(slice), a.slices = Divisor(uint32_t(slices));
  a.tasks = uint32_t(tasks);
  const int64_t waves = trial("FUSELINE_E_WAVES", 1);
  const int64_t blocks = std::min(divide_up(tasks, kFewWarps), divide_up(at_once * waves, kFewWarps));
  return launch(embedding_few_sums<T, kWide>, a, blocks, dim3(kFewBlock), 0, 1, stream, device.clusters);
}

template <class T, int kWide>
int run_many(RowSums& a, void* workspace, const Device& device, void* stream) {
  const int64_t accesses = a.n / kWide, slice = slice_of(accesses), slices = divide_up(accesses, slice);
  SummedTable& table = a.table;
  const BinPlan plan = plan_bins(a.items, table.rows, slices);
  const BinSpace at = bin_space(plan, slices, a.n);
  char* const space = static_cast<char*>(workspace);
  cudaError_t error = cudaMemsetAsync(space, 0, at.partials, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return int(error);
  Bins b{};
  b.ids = table.ids, b.period = table.period, b.skipped = table.skipped;
  b.entries = reinterpret_cast<uint32_t*>(space + at.entries), b.starts = reinterpret_cast<uint16_t*>(space + at.starts);
  b.totals = reinterpret_cast<uint32_t*>(space);
  b.items = a.items, b.rows = table.rows, b.tile = uint32_t(plan.tile), b.tiles = uint32_t(plan.tiles);
  b.bins = uint32_t(plan.bins), b.bin_rows = Divisor(uint32_t(plan.bin_rows));
  int resident = 0;
  const size_t bins_shared = bin_shared(b.tile, b.bins);
  error = resident_clusters(embedding_bin_ids, device, kBinBlock, bins_shared, 1, resident);
  if (error != cudaSuccess) return int(error);
  const int code = launch(embedding_bin_ids, b, plan.tiles, dim3(kBinBlock), bins_shared, 1, stream);
  if (code || trial("FUSELINE_E_ONLYBINS", 0)) return code;
  table.bins = b.bins, table.bin_rows = uint32_t(plan.bin_rows);
  a.entries = b.entries, a.starts = b.starts, a.totals = b.totals;
  a.arrived = reinterpret_cast<uint32_t*>(space + at.arrived), a.partials = reinterpret_cast<float*>(space + at.partials);
  a.tile = b.tile, a.tiles = b.tiles, a.further = uint32_t(plan.further), a.capacity = uint32_t(listed());
  a.slice = Divisor(uint32_t(slice)), a.slices = Divisor(uint32_t(slices));
  const size_t shared = sum_shared<kWide>(true, a.capacity, table.bin_rows);
  auto kernel = embedding_row_sums<T, kWide, true>;
  if constexpr (sizeof(T) == 2 && kWide > 1) {
    if (trial("FUSELINE_E_AHEAD", 4) == 8) kernel = embedding_row_sums<T, kWide, true, 8>;
  }
  error = resident_clusters(kernel, device, kSumBlock, shared, 1, resident);
  if (error != cudaSuccess) return int(error);
  return launch(kernel, a, (plan.bins + plan.further) * slices, dim3(kSumBlock), shared, 1, stream, device.clusters);
}

}  // namespace
}  // namespace fuseline

size_t fuseline_embedding_backward_workspace(int64_t items, int64_t n) {
  using namespace fuseline;
  if (items <= 0 || n <= 0) return 0;
  // Of any table: the most bins, and the most rows of one.
  BinPlan most = plan_bins(items, int64_t(kMostBins) * kMostBinRows, 1);
  most.bins = kMostBins, most.bin_rows = kMostBinRows;
  return std::max(old_workspace(items, n), bin_space(most, divide_up(n, 16), n).end);
}

int fuseline_embedding_backward(const void* grad_out, const int64_t* ids, int64_t period, int64_t skipped,
                                void* grad_table, void* workspace, int64_t items, int64_t n, int64_t rows,
                                const int64_t* seed, double p, int dtype, void* stream) {
  using namespace fuseline;
  if (items < 0 || n < 0 || rows < 0 || period < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype)) return FUSELINE_UNSUPPORTED;
  if (too_many(items, n) || rows >= 0xffffffffll) return int(cudaErrorInvalidConfiguration);
  if (n == 0 || rows == 0) return 0;
  if (items == 0 || period == 0) return zero(grad_table, rows * n, dtype, stream);
  if (!can_bin(rows)) {
    return sum_sorted(grad_out, ids, period, skipped, grad_table, workspace, items, n, rows, seed, p, dtype, stream);
  }
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  RowSums a{};
  a.grad_out = grad_out, a.items = uint32_t(items), a.n = n, a.dropout = dropout_of(seed, p);
  a.table = {ids, period, skipped, grad_table, uint32_t(rows), 0, 0};
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_width<T>(n, {grad_out, grad_table}, [&](auto wide) {
      constexpr int kWide = decltype(wide)::value;
      if (items <= kMostFewIds && trial("FUSELINE_E_WARP", 0)) return run_warps<T, kWide>(a, device, stream);
      return few_items(items) ? run_few<T, kWide>(a, device, stream) : run_many<T, kWide>(a, workspace, device, stream);
    });
  });
}

int fuseline_embedding_position_backward(const void* grad_out, void* grad_table, int64_t items, int64_t n, int64_t rows,
                                         int64_t period, const int64_t* seed, double p, int dtype, void* stream) {
  using namespace fuseline;
  if (items < 0 || n < 0 || rows < 0 || period < 0 || period > rows) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype)) return FUSELINE_UNSUPPORTED;
  if (too_many(items, n)) return int(cudaErrorInvalidConfiguration);
  if (n == 0 || rows == 0) return 0;
  if (items == 0 || period == 0) return zero(grad_table, rows * n, dtype, stream);
  const int64_t bytes = period * n * (dtype == FUSELINE_FLOAT32 ? 4 : 2);
  if (rows > period) {
    const int code = zero(static_cast<char*>(grad_table) + bytes, (rows - period) * n, dtype, stream);
    if (code) return code;
  }
  PositionGradient a{};
  a.grad_out = grad_out, a.result = grad_table, a.items = items, a.period = period, a.n = n;
  a.dropout = dropout_of(seed, p);
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_width<T>(n, {grad_out, grad_table}, [&](auto wide) {
      constexpr int kWide = decltype(wide)::value;
      a.columns = Divisor(uint32_t(n / kWide));
return launch(embedding_position_sums<T, kWide>, a, blocks_for(period * a.columns.value), dim3(kElementwiseBlock), 0, 1,
                    stream);
    });
  });
}
