// Which kernels look up the rows of embeddings and sum their gradients, and how: the one place that decides. embedding.cu and
// embedding_backward.cu launch what the plan says, and `fuseline explain embedding` prints it.
#pragma once

#include <limits>

#include "elementwise.h"

namespace fuseline {

constexpr int kSumBlock = 256;
constexpr int kSumWarps = kSumBlock / kWarp;
constexpr int kBinBlock = 1024;
constexpr int kBinWarps = kBinBlock / kWarp;
constexpr int kOfThread = 16;  // ids of a thread, in registers
constexpr int kMostTile = kBinBlock * kOfThread;
constexpr int kMostBins = 2 * kBinBlock;
constexpr int kMostBinRows = 80;  // 2,048 bins reach 163,840 rows, and a list has room for a bin like that

struct EmbeddingProblem {
  int element_size;
  int64_t items, n, rows;
  int wide;        // elements of an access: of 16 bytes, or one
  bool positions;  // there is a table of positions
  bool fp16 = false;  // which no model has

  bool has_one_kernel() const { return wide == 1 || fp16; }  // for all lookups
};

// ---- forward ----

struct EmbeddingForwardPlan {
  const char* reason = "each token's row is copied, a slice of columns for all tokens at a time";
  LaunchShape shape;
  int64_t slices = 1;       // of columns; each has `shape.grid` blocks
  int64_t slice = 0;        // accesses of a row that a block reaches
  int rows_of_thread = 0;   // all on their way before the first is used
  bool positions = false;   // the kernel that reads them
  bool streams = false;     // y is more than the L2 keeps for its reader: leave the room to the table
  WalkPlan walk;
};

namespace embedding_plans {

// Rows of a thread. Measured on an H100 in bf16: 512 rows of 1,024 2.5 us by two and 2.8 by four, of 16,384 13.1 and 15.9; one is
// up to 1% better where a row has 128 KB, and 3% worse elsewhere.
constexpr int kManyRows = 4, kFewRows = 2;
constexpr int64_t kFewLookups = 1024;
constexpr int64_t kResident = 16 << 20;  // bytes that stay in the L2 beside what passes through: measured on an H100

// Accesses of a row that are taken for all items before the next ones: so many that this part of the table stays in the
// L2, and HBM is read once. 128 bytes at least.
inline int64_t accesses_of_slice(int64_t rows, int64_t access_bytes) {
  constexpr int64_t kLeast = 128;
  if (access_bytes < 16) return std::numeric_limits<int64_t>::max();
  int64_t bytes = kLeast;
  while (2 * bytes * rows <= kResident && bytes < (1 << 20)) bytes *= 2;
  return bytes / access_bytes;
}

}  // namespace embedding_plans

inline EmbeddingForwardPlan plan_embedding_forward(const EmbeddingProblem& p, const Device& device) {
  using namespace embedding_plans;
  EmbeddingForwardPlan plan;
  plan.rows_of_thread = !p.has_one_kernel() && p.items <= kFewLookups ? kFewRows : kManyRows;
  plan.positions = p.positions || p.has_one_kernel();
  plan.streams = p.items * p.n * p.element_size > kResident;
  plan.walk = plan_walk(p.items * p.n, p.n, p.wide, plan.rows_of_thread, device);
  const int64_t accesses = p.n / p.wide;
  plan.slice = std::min(accesses, accesses_of_slice(p.rows, int64_t(p.wide) * p.element_size));
  plan.slices = divide_up(accesses, plan.slice);
  plan.shape = {divide_up(plan.walk.groups * plan.slice, kElementwiseBlock), kElementwiseBlock, 1, 1, 0};
  return plan;
}

// ---- backward ----

namespace embedding_plans {

// Measured on an H100, bf16.
constexpr int64_t kFewSums = 4096;      // at 768 columns faster than bins (1,024: 35 us and 45; 4,096: 42 and 45)
constexpr int64_t kSumBlocks = 528;      // that few ids are spread over, and many at least: four a multiprocessor
constexpr int64_t kItemsOfBin = 2048;    // of many; at 64 columns twice as many are 12% slower, half as many 3%
constexpr int64_t kListed = 3072;        // items of a block's list; 2,048 and 4,096 are up to 4% slower
constexpr int64_t kLeastListed = 128;    // where a few rows have all the ids, so that more blocks add them up
constexpr int64_t kItemsOfRow = 128;     // so many a row, and bins share their rows out better
constexpr int64_t kMostSlice = 128;      // accesses of a row that a block takes
constexpr int64_t kSureTile = 4096;      // ids that a block sorts at once on any device, of which fewer bins leave room

// Shared memory of the kernels that put ids into bins and that sum rows, in accesses of `wide` elements.
inline int64_t bin_shared(int64_t tile, int64_t bins) {
  const int64_t even = (bins + 1) / 2 * 2;
  return 4 * tile + 4 * even + 2 * kBinWarps * even;
}
inline int64_t sum_shared(int wide, bool binned, int64_t capacity, int64_t bin_rows) {
  const int64_t list = capacity * (binned ? 6 : 2), sums = int64_t(2) * kSumBlock * wide * 4;
  return capacity * 6 + divide_up(std::max(list, sums), 16) * 16 + 4 * (int64_t(kSumWarps + 1) * bin_rows + 1);
}

// Accesses of a slice of a row: the longest with which nearly all threads of a block have one.
inline int64_t slice_of(int64_t accesses) {
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

inline int64_t slices_of(int64_t accesses) { return divide_up(accesses, slice_of(accesses)); }

// Rows of a block where few ids are looked through. The fewer ids, the cheaper more blocks, which end more evenly, down to
// 16 KB of gradient: of 1,024 rows of 65,536, 4 ids take 49 us by 128 rows, 47 by 32, 45 by 8; 512 ids 78, 77, 81.
inline int64_t rows_of_few(int64_t items, int64_t rows, int64_t slice, int64_t slices) {
  const int64_t blocks = std::max<int64_t>(1, kSumBlocks / slices);
  const int64_t least = std::max(divide_up(rows, blocks), divide_up(kSumBlock / 2, slice));
  const int64_t most = std::max({items / 16, items <= 32 ? int64_t(8) : int64_t(32), 4 * kSumBlock / slice});
  return std::min({least, most, rows, int64_t(kSumBlock)});
}

struct BinPlan {
  int64_t tile, tiles, bins, bin_rows, capacity, further;
};

// Shared memory of a block, beside what a kernel declares.
inline int64_t room_of(const Device& device) { return int64_t(device.shared_a_block) - 1024; }

inline int64_t most_bins(int64_t room) {
  return std::min<int64_t>(kMostBins, (room - 4 * kSureTile) / bin_shared(0, 2) * 2);
}

// What bins with more items than a block lists leave in memory is n / 8 + 16 bytes an item at most, a sixteenth of a bf16
// grad_out: rows of a bin and items of a list keep to that.
inline BinPlan plan_bins(int64_t items, int64_t n, int64_t rows, int64_t slices, int64_t room) {
  BinPlan plan{};
  const int64_t fitting_rows = kListed * (n + 128) / (64 * n);
  const int64_t wanted =
      std::max({divide_up(items, kItemsOfBin), divide_up(kSumBlocks, slices), divide_up(rows, fitting_rows)});
  plan.bin_rows = std::min<int64_t>(kMostBinRows, divide_up(rows, std::min(wanted, most_bins(room))));
  plan.bins = divide_up(rows, plan.bin_rows);
  const int64_t most = (room - bin_shared(0, plan.bins)) / 4 / kBinBlock * kBinBlock;
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

inline BinSpace bin_space(int64_t items, int64_t tiles, int64_t bins, int64_t arrivals, int64_t partial_bytes) {
  const auto after = [](size_t at, int64_t bytes) { return at + size_t(divide_up(bytes, 16) * 16); };
  BinSpace at{};
  at.arrived = after(at.totals, bins * 4);
  at.partials = after(at.arrived, arrivals * 4);
  at.starts = after(at.partials, partial_bytes);
  at.entries = after(at.starts, (bins + 1) * tiles * 2);
  at.end = after(at.entries, items * 4);
  return at;
}

}  // namespace embedding_plans

struct EmbeddingBackwardPlan {
  bool binned = false;
  const char* reason = "";
  LaunchShape shape;      // of the kernel that sums rows
  LaunchShape bin_shape;  // of the one before it that puts ids into bins
  int64_t part = 0;       // rows of the table that bins reach in one pass; others follow
  int64_t slice = 0, slices = 0;  // accesses of a row that a block takes
  int64_t capacity = 0;   // items of a block's list
  embedding_plans::BinPlan bins{};
  embedding_plans::BinSpace at{};
};

namespace embedding_plans {

inline EmbeddingBackwardPlan plan_few_sums(const EmbeddingProblem& p) {
  EmbeddingBackwardPlan plan;
  plan.reason = "the ids are few: every block looks through all of them";
  plan.slice = slice_of(p.n / p.wide), plan.slices = divide_up(p.n / p.wide, plan.slice), plan.part = p.rows;
  plan.bins.bin_rows = rows_of_few(p.items, p.rows, plan.slice, plan.slices);
  plan.bins.bins = divide_up(p.rows, plan.bins.bin_rows);
  plan.capacity = divide_up(p.items, kWarp) * kWarp;
  plan.shape = {plan.bins.bins * plan.slices, kSumBlock, 1, 1, size_t(sum_shared(p.wide, false, plan.capacity, plan.bins.bin_rows))};
  return plan;
}

// Of the rows that bins reach in one pass.
inline EmbeddingBackwardPlan plan_binned_sums(const EmbeddingProblem& p, const Device& device) {
  EmbeddingBackwardPlan plan;
  plan.binned = true, plan.reason = "the ids are sorted into bins of neighbouring rows, whose blocks then sum them in order";
  plan.slice = slice_of(p.n / p.wide), plan.slices = divide_up(p.n / p.wide, plan.slice), plan.part = p.rows;
  plan.bins = plan_bins(p.items, p.n, p.rows, plan.slices, room_of(device)), plan.capacity = plan.bins.capacity;
  const BinPlan& bins = plan.bins;
  plan.at = bin_space(p.items, bins.tiles, bins.bins, bins.further * plan.slices, 2 * bins.further * bins.bin_rows * p.n * 4);
  plan.bin_shape = {bins.tiles, kBinBlock, 1, 1, size_t(bin_shared(bins.tile, bins.bins))};
  plan.shape = {(bins.bins + bins.further) * plan.slices, kSumBlock, 1, 1,
                size_t(sum_shared(p.wide, true, plan.capacity, bins.bin_rows))};
  return plan;
}

}  // namespace embedding_plans

// The first launch; a table that is larger than `part` rows is summed in equal parts, with the ids put into bins anew for each.
inline EmbeddingBackwardPlan plan_embedding_backward(const EmbeddingProblem& p, const Device& device) {
  using namespace embedding_plans;
  if (p.items <= kFewSums && p.items <= p.rows * kItemsOfRow) return plan_few_sums(p);
  EmbeddingProblem part = p;
  part.rows = divide_up(p.rows, divide_up(p.rows, most_bins(room_of(device)) * kMostBinRows));
  return plan_binned_sums(part, device);
}

// Bytes that any table wants, in any access, on any device.
inline size_t embedding_workspace(int64_t items, int64_t n) {
  using namespace embedding_plans;
  if (items <= kItemsOfRow || n <= 0) return 0;
  const int64_t tiles = std::max(divide_up(items, kSureTile), std::min<int64_t>(128, divide_up(items, kBinBlock)));
  const int64_t slices = std::max({slices_of(n), slices_of(divide_up(n, 4)), slices_of(divide_up(n, 8))});
  const int64_t arrivals = std::max(items / kListed * slices, kSumBlocks / 2);  // of lists as short as `evenly`, the latter
  const int64_t partials = divide_up(items * (n + 128), 8);
  return bin_space(items, tiles, kMostBins, arrivals, partials).end;
}

}  // namespace fuseline
