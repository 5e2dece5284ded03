// The gradients of the tables of y = dropout(table[token] + position_table[position]).
//
// Moves: grad_out read once for each table, in the order of the rows it goes to, and the gradient written once, zeros where
// no id names a row. Limit: HBM bandwidth, for few tokens the launches.
//
// Threads: few ids are looked through by every block, which adds up some neighbouring rows: one launch
// (embedding_sums.cuh). Many are first sorted into bins of such rows (embedding_bins.cuh). No atomics on floats: the same
// bits each run, however often an id comes. Without ids the positions repeat, and a thread adds up the rows of one
// position.

#include "embedding.cuh"
#include "embedding_bins.cuh"
#include "embedding_sums.cuh"

namespace fuseline {
namespace {

constexpr int kAhead = 4;  // rows of a position loaded before the first is added

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

// Measured on an H100, bf16.
constexpr int64_t kFewItems = 4096;      // at 768 columns faster than bins (1,024: 35 us and 45; 4,096: 42 and 45)
constexpr int64_t kSumBlocks = 528;      // that few ids are spread over, and many at least: four a multiprocessor
constexpr int64_t kItemsOfBin = 2048;    // of many; at 64 columns twice as many are 12% slower, half as many 3%
constexpr int64_t kListed = 3072;        // items of a block's list; 2,048 and 4,096 are up to 4% slower
constexpr int64_t kLeastListed = 128;    // where a few rows have all the ids, so that more blocks add them up
constexpr int64_t kItemsOfRow = 128;     // so many a row, and bins share their rows out better
constexpr int64_t kMostSlice = 128;      // accesses of a row that a block takes
constexpr int64_t kSureTile = 4096;      // ids that a block sorts at once on any device, of which fewer bins leave room

int zero(void* at, int64_t elements, int dtype, void* stream) {
  const size_t bytes = size_t(elements) * (dtype == FUSELINE_FLOAT32 ? 4 : 2);
  return int(cudaMemsetAsync(at, 0, bytes, static_cast<cudaStream_t>(stream)));
}

unsigned blocks_for(int64_t threads) { return unsigned(divide_up(threads, kElementwiseBlock)); }

// Accesses of a slice of a row: the longest with which nearly all threads of a block have one.
int64_t slice_of(int64_t accesses) {
  int64_t best = 1, most_used = 0;
  for (int64_t slices = divide_up(accesses, kMostSlice); slices <= accesses; ++slices) {
    const int64_t slice = divide_up(accesses, slices);
    if (slice < 16 && most_used > 0) break;
    const int64_t used = (kSumBlock / slice * slice) * 1024 / kSumBlock * accesses / (slices * slice);
    if (used > most_used) best = slice, most_used = used;
    if (used >= 780) break;
  }
  return best;
}

int64_t slices_of(int64_t accesses) { return divide_up(accesses, slice_of(accesses)); }

// Rows of a block where few ids are looked through. The fewer ids, the cheaper more blocks, which end more evenly, down to
// 16 KB of gradient: of 1,024 rows of 65,536, 4 ids take 49 us by 128 rows, 47 by 32, 45 by 8; 512 ids 78, 77, 81.
int64_t rows_of_few(int64_t items, int64_t rows, int64_t slice, int64_t slices) {
  const int64_t blocks = std::max<int64_t>(1, kSumBlocks / slices);
  const int64_t least = std::max(divide_up(rows, blocks), divide_up(kSumBlock / 2, slice));
  const int64_t most = std::max({items / 16, items <= 32 ? int64_t(8) : int64_t(32), 4 * kSumBlock / slice});
  return std::min({least, most, rows, int64_t(kSumBlock)});
}

struct BinPlan {
  int64_t tile, tiles, bins, bin_rows, capacity, further;
};

// Shared memory of a block, beside what a kernel declares.
int64_t room_of(const Device& device) { return int64_t(device.shared_a_block) - 1024; }

int64_t most_bins(int64_t room) {
  return std::min<int64_t>(kMostBins, (room - 4 * kSureTile) / int64_t(bin_shared(0, 2)) * 2);
}

// What bins with more items than a block lists leave in memory is n / 8 + 16 bytes an item at most, a sixteenth of a bf16
// grad_out: rows of a bin and items of a list keep to that.
BinPlan plan_bins(int64_t items, int64_t n, int64_t rows, int64_t slices, int64_t room) {
  BinPlan plan{};
  const int64_t fitting_rows = kListed * (n + 128) / (64 * n);
  const int64_t wanted =
      std::max({divide_up(items, kItemsOfBin), divide_up(kSumBlocks, slices), divide_up(rows, fitting_rows)});
  plan.bin_rows = std::min<int64_t>(kMostBinRows, divide_up(rows, std::min(wanted, most_bins(room))));
  plan.bins = divide_up(rows, plan.bin_rows);
  const int64_t most = (room - int64_t(bin_shared(0, uint32_t(plan.bins)))) / 4 / kBinBlock * kBinBlock;
  plan.tile = std::min({divide_up(divide_up(items, 128), kBinBlock) * kBinBlock, most, int64_t(kMostTile)});
  plan.tiles = divide_up(items, plan.tile);
  const int64_t evenly = std::clamp(divide_up(2 * items * slices, kSumBlocks), kLeastListed, kListed);
  plan.capacity = divide_up(std::max(evenly, divide_up(64 * plan.bin_rows * n, n + 128)), kWarp) * kWarp;
  plan.further = items / plan.capacity;
  return plan;
}

// Where the parts of the workspace are, in bytes. What is before the partial sums starts as zeros.
struct BinSpace {
  size_t totals, arrived, partials, starts, entries, end;
};

BinSpace bin_space(int64_t items, int64_t tiles, int64_t bins, int64_t arrivals, int64_t partial_bytes) {
  const auto after = [](size_t at, int64_t bytes) { return at + size_t(divide_up(bytes, 16) * 16); };
  BinSpace at{};
  at.arrived = after(at.totals, bins * 4);
  at.partials = after(at.arrived, arrivals * 4);
  at.starts = after(at.partials, partial_bytes);
  at.entries = after(at.starts, (bins + 1) * tiles * 2);
  at.end = after(at.entries, items * 4);
  return at;
}

template <class T, int kWide>
int run_few(RowSums& a, const Device& device, void* stream) {
  const int64_t accesses = a.n / kWide, slice = slice_of(accesses), slices = divide_up(accesses, slice);
  a.slice = Divisor(uint32_t(slice)), a.slices = Divisor(uint32_t(slices));
  SummedTable& table = a.table;
  table.bin_rows = uint32_t(rows_of_few(a.items, table.rows, slice, slices));
  table.bins = uint32_t(divide_up(table.rows, table.bin_rows));
  a.capacity = uint32_t(divide_up(a.items, kWarp) * kWarp);
  const size_t shared = sum_shared<kWide>(false, a.capacity, table.bin_rows);
  const auto kernel = embedding_row_sums<T, kWide, false>;
  int resident = 0;
  const cudaError_t error = resident_clusters(kernel, device, kSumBlock, shared, 1, resident);
  if (error != cudaSuccess) return int(error);
  return launch(kernel, a, table.bins * slices, dim3(kSumBlock), shared, 1, stream, device.clusters);
}

// The gradients of the table.rows rows from `first_row` on, which bins reach in one pass.
template <class T, int kWide>
int run_binned(RowSums a, int64_t first_row, void* workspace, const Device& device, void* stream) {
  const int64_t accesses = a.n / kWide, slice = slice_of(accesses), slices = divide_up(accesses, slice);
  SummedTable& table = a.table;
  const BinPlan plan = plan_bins(a.items, a.n, table.rows, slices, room_of(device));
  const int64_t partials = 2 * plan.further * plan.bin_rows * a.n * 4;
  const BinSpace at = bin_space(a.items, plan.tiles, plan.bins, plan.further * slices, partials);
  char* const space = static_cast<char*>(workspace);
  cudaError_t error = cudaMemsetAsync(space, 0, at.partials, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return int(error);
  Bins b{};
  b.ids = table.ids, b.period = table.period, b.skipped = table.skipped, b.first_row = first_row;
  b.entries = reinterpret_cast<uint32_t*>(space + at.entries), b.starts = reinterpret_cast<uint16_t*>(space + at.starts);
  b.totals = reinterpret_cast<uint32_t*>(space);
  b.items = a.items, b.rows = table.rows, b.tile = uint32_t(plan.tile), b.tiles = uint32_t(plan.tiles);
  b.bins = uint32_t(plan.bins), b.bin_rows = Divisor(uint32_t(plan.bin_rows));
  int resident = 0;
  const size_t bins_shared = bin_shared(b.tile, b.bins);
  error = resident_clusters(embedding_bin_ids, device, kBinBlock, bins_shared, 1, resident);
  if (error != cudaSuccess) return int(error);
  const int code = launch(embedding_bin_ids, b, plan.tiles, dim3(kBinBlock), bins_shared, 1, stream);
  if (code) return code;
  table.result = static_cast<T*>(table.result) + first_row * a.n;
  table.bins = b.bins, table.bin_rows = uint32_t(plan.bin_rows);
  a.entries = b.entries, a.starts = b.starts, a.totals = b.totals;
  a.arrived = reinterpret_cast<uint32_t*>(space + at.arrived), a.partials = reinterpret_cast<float*>(space + at.partials);
  a.tile = b.tile, a.tiles = b.tiles, a.further = uint32_t(plan.further), a.capacity = uint32_t(plan.capacity);
  a.slice = Divisor(uint32_t(slice)), a.slices = Divisor(uint32_t(slices));
  const size_t shared = sum_shared<kWide>(true, a.capacity, table.bin_rows);
  const auto kernel = embedding_row_sums<T, kWide, true>;
  error = resident_clusters(kernel, device, kSumBlock, shared, 1, resident);
  if (error != cudaSuccess) return int(error);
  return launch(kernel, a, (plan.bins + plan.further) * slices, dim3(kSumBlock), shared, 1, stream, device.clusters);
}

}  // namespace
}  // namespace fuseline

size_t fuseline_embedding_backward_workspace(int64_t items, int64_t n) {
  using namespace fuseline;
  if (items <= kItemsOfRow || n <= 0) return 0;
  // Of any table, in any access, on any device.
  const int64_t tiles = std::max(divide_up(items, kSureTile), std::min<int64_t>(128, divide_up(items, kBinBlock)));
  const int64_t slices = std::max({slices_of(n), slices_of(divide_up(n, 4)), slices_of(divide_up(n, 8))});
  const int64_t arrivals = std::max(items / kListed * slices, kSumBlocks / 2);  // of lists as short as `evenly`, the latter
  const int64_t partials = divide_up(items * (n + 128), 8);
  return bin_space(items, tiles, kMostBins, arrivals, partials).end;
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
      if (items <= kFewItems && items <= rows * kItemsOfRow) return run_few<T, kWide>(a, device, stream);
      // A larger table in equal parts, with the ids put into bins anew for each.
      const int64_t part = divide_up(rows, divide_up(rows, most_bins(room_of(device)) * kMostBinRows));
      int code = 0;
      for (int64_t first = 0; first < rows && code == 0; first += part) {
        a.table.rows = uint32_t(std::min(part, rows - first));
        code = run_binned<T, kWide>(a, first, workspace, device, stream);
      }
      return code;
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
      return launch(embedding_position_sums<T, kWide>, a, blocks_for(period * a.columns.value),
                    dim3(kElementwiseBlock), 0, 1, stream);
    });
  });
}
