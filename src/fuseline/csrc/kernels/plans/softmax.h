// Which kernel takes a softmax, and how: the one place that decides. softmax_forward.cu, softmax_masked.cu and
// softmax_backward.cu launch what the plan says, and `fuseline explain softmax` prints it.
#pragma once

#include "packed.h"
#include "tiles.h"
#include "waiting.h"

namespace fuseline {

enum class SoftmaxKernel {
  unsupported,       // no kernel
  few,               // rows so few that all their threads run at once, in registers
  packed,            // registers, as the row came
  tiled,             // short rows at odd addresses, several a copy, through shared memory
  tiled_vectors,     // the same of rows that keep to 16-byte steps, but not to lines of the cache
  waiting,           // shared memory, in bulk copies
  waiting_together,  // the same, several rows a block
  masked,            // under a mask or causal, in registers
  rows,              // registers
  streamed           // the row is read twice
};

// As profilers show it, after the direction's prefix softmax_forward_ or softmax_backward_.
inline const char* name_of(SoftmaxKernel kernel) {
  switch (kernel) {
    case SoftmaxKernel::few:
      return "few";
    case SoftmaxKernel::packed:
      return "packed";
    case SoftmaxKernel::tiled:
      return "tiled";
    case SoftmaxKernel::tiled_vectors:
      return "tiled_vectors";
    case SoftmaxKernel::waiting:
    case SoftmaxKernel::waiting_together:
      return "waiting";
    case SoftmaxKernel::rows:
      return "rows";
    case SoftmaxKernel::streamed:
      return "streamed";
    default:
      return "";
  }
}

struct SoftmaxPlan {
  SoftmaxKernel kernel = SoftmaxKernel::unsupported;
  const char* reason = "";
  LaunchShape shape;
  int held = 0;           // 16-byte vectors that a thread holds, or elements at most of `tiled`
  bool one_warp = false;  // `rows`, `masked`: the threads of a row are of one warp
  int blocks = 0;         // `packed`: that a multiprocessor has at least
  int part = 0;           // slots of a warp's part of a row that waits, or rows of a tile
  int together = 0;       // rows that wait in a block
  int line = 0;           // bytes, at which the parts of rows that wait begin
  Refused refusable = Refused::nothing;  // what is refused if the device does not hold this plan
};

// Rows of a few warps, no more of them than multiprocessors, have a vector a thread: 4 x 1,024 elements of 16 bits 1.64
// us, 128 x 1,024 1.93, and in a warp that holds four vectors 1.73 and 1.99; 512 rows 6.05, and 2.91.
inline RowPlan plan_few_softmax(int64_t rows, int64_t vectors, int held_by_warp, const Device& device) {
  const bool few_warps = vectors > kWarp && vectors <= int64_t(held_by_warp) * kWarp;
  if (few_warps && rows <= device.processors) return plan_spread(rows, vectors, 1, 1, 1, device);
  return plan_few(rows, vectors, held_by_warp, device);
}

struct FewRows {
  int held = 0;     // vectors of a thread; 0: rows are too many, or too long
  int threads = 0;  // of a block that share a row
  int beside = 1;   // rows of a block
  int cluster = 1;  // blocks of a row
};

// A vector a thread while all threads that run at once are enough for that, two of rows twice as many. Rows of more than a
// warp are no more than multiprocessors. In us, of 16 bits: 128 x 768 forward 1.32 where softmax_forward_rows takes 1.81 (with
// four vectors in a warp 1.41, three 1.34), backward 1.13 and 1.52; 4 x 16,384 backward 1.46 and 2.46 (blocks of 256 threads
// 1.47, of 512 1.54), 128 x 16,384 forward 4.99 and 6.50. takes_four: four vectors a thread of the longest rows too, 128 x
// 65,536 forward in 13.62, waiting in shared memory 16.07 (in ten other layouts there 15.87 and more), by blocks of 512 threads
// 14.82, by those of two vectors 15.99; of 512 rows 51.2 any way. Rows of a block alone
// have one vector a thread.
inline FewRows plan_few_rows(int64_t rows, int64_t vectors, bool takes_four, const Device& device) {
  FewRows plan;
  const int64_t at_once = int64_t(device.processors) * 1024, most = int64_t(device.clusters ? kMaxCluster : 1) * kMostThreads;
  if (rows > device.processors && vectors > kWarp) return plan;
  const bool two = rows * vectors > at_once || vectors > most, four = rows * vectors > 2 * at_once;
  if (four && !(takes_four && device.clusters && vectors > most && vectors <= 2 * most)) return plan;
  const int held = four ? 4 : two ? 2 : 1;
  if (vectors > kWarp * held) {
    const int64_t block = four ? 256 : rows * 4 <= device.processors ? 128 : kMostThreads;
    while (device.clusters && plan.cluster < kMaxCluster && vectors > plan.cluster * block * held) plan.cluster *= 2;
    plan.threads = int(divide_up(divide_up(vectors, held * plan.cluster), kWarp)) * kWarp;
  } else {
    plan.threads = power_of_two_from(divide_up(vectors, held));
    const int a_warp = kWarp / plan.threads;
    const int64_t spread = divide_up(divide_up(rows, device.processors), a_warp) * a_warp;
    plan.beside = int(std::min<int64_t>(kShortRowBlock / plan.threads, spread));
  }
  const bool too_long = plan.threads > kMostThreads || (held > 1 && plan.threads > kWarp && plan.cluster == 1);
  plan.held = too_long ? 0 : held;
  return plan;
}

// How a row's warps meet: kOne has it, kFour read each other's states, kBlock a lane each, kCluster across blocks.
enum class Meet { kOne, kFour, kBlock, kCluster };

inline Meet meeting_of(const LaunchShape& shape) {
  if (shape.cluster > 1) return Meet::kCluster;
  const int warps = shape.threads / kWarp;
  return warps <= 1 ? Meet::kOne : warps <= 4 ? Meet::kFour : Meet::kBlock;
}

struct SoftmaxForwardProblem {
  int element_size;
  int64_t rows, n;
  int x_at, y_at;  // addresses modulo 128
  float scale;
  bool causal, masked;
  bool mask_vectors;  // the mask can be read a vector of x at a time
  bool fp16 = false;
};

struct SoftmaxBackwardProblem {
  int element_size;
  int64_t rows, n;
  int grad_out_at, y_at, grad_x_at;  // addresses modulo 128
  bool fp16 = false;
};

// No model takes a softmax of fp16 that is fast by special kernels: it has those of rows that wait and rows in registers alone.
namespace softmax_plans {

constexpr int kMostHeldBackward = 4, kMostHeldMasked = 4;  // four vectors of each row are 32 registers
constexpr int most_held_forward(int element_size) { return 2 * element_size; }

// The kernels check these.
constexpr size_t forward_room(int element_size) { return waiting_room(element_size == 4 ? 16 : 8); }
constexpr size_t backward_room() { return waiting_room(8); }

inline void shape_few(SoftmaxPlan& plan, int64_t rows, const FewRows& few) {
  plan.kernel = SoftmaxKernel::few, plan.held = few.held;
  plan.reason = "the rows are so few that all their threads run at once";
  plan.shape = {divide_up(rows, few.beside) * few.cluster, few.threads, few.beside, few.cluster, 0};
}

inline void shape_rows(SoftmaxPlan& plan, int64_t rows, const RowPlan& layout) {
  plan.kernel = layout.streamed ? SoftmaxKernel::streamed : SoftmaxKernel::rows;
  plan.reason = layout.streamed ? "no layout holds the row: it is read once for the sum and once more to be written"
                                : "registers hold the row";
  plan.one_warp = layout.one_warp;
  plan.shape = {grid_for(layout, rows), layout.threads, layout.rows, layout.cluster, 0};
}

inline void shape_tiles(SoftmaxPlan& plan, SoftmaxKernel kernel, const Tiling& tiles) {
  plan.kernel = kernel, plan.part = tiles.rows;
  plan.reason = kernel == SoftmaxKernel::tiled ? "a row is no multiple of 16 bytes: a block copies neighbouring rows at once"
                                               : "many rows do not end with lines of the cache: a block copies several at once";
  plan.shape = shape_of(tiles);
}

inline void shape_waiting(SoftmaxPlan& plan, int64_t rows, const Waiting& layout, int line, bool together, Refused if_refused) {
  plan.kernel = together ? SoftmaxKernel::waiting_together : SoftmaxKernel::waiting;
  plan.reason = if_refused == Refused::of_table ? "the table of measured layouts has the row wait in shared memory"
                : together ? "rows at odd addresses wait in shared memory, several in a block"
                           : "registers do not hold the row: it waits in shared memory";
  plan.part = layout.part, plan.together = layout.together, plan.line = line, plan.refusable = if_refused;
  plan.shape = shape_of(layout, rows);
}

// The vectors that a thread holds of rows in registers, for which there is a kernel; 0 if there is none.
inline int held_of(const RowPlan& layout, bool plain, int most) {
  if (layout.stages > 0) return 0;
  if (!plain) return layout.held == 1 ? 1 : most;
  const bool in_warp = layout.held == most / 2 || layout.held == most / 4, in_block = layout.held == 2;
  const bool there = layout.held == most || layout.held == 1 || (layout.one_warp ? in_warp : in_block);
  return there ? layout.held : 0;
}

inline bool shape_layout(SoftmaxPlan& plan, int64_t rows, const RowPlan& layout, bool plain, int most) {
  plan.held = layout.streamed ? 0 : held_of(layout, plain, most);
  if (!layout.fits || (!layout.streamed && plan.held == 0)) return false;
  shape_rows(plan, rows, layout);
  return true;
}

constexpr int64_t kLongRow = 16384;  // beyond which a block's registers do not hold a row

// ---- forward ----

// Of a block that shares an aligned row with others. Rows of 64 KB in bf16, in blocks of 64, 32, 16 and 8 KB: 0.935, 0.945,
// 0.967 and 0.809 of the copy bandwidth; of 100 KB at odd addresses, in blocks of 100, 50, 25 and 13 KB: 0.921, 0.912, 0.945
// and 0.857.
constexpr int64_t block_bytes(int element_size) { return element_size == 4 ? 32768 : 16384; }
constexpr int64_t kOddBlockBytes = 32768;

// Of a block of rows of fp32 that have more than kMaxCluster, as of 262,144 elements: 191.6 us, and by the 10 warps that a
// multiprocessor has registers for, whose last pieces are not full, 204.9; by 16 225.8, in clusters of 8 224.9.
constexpr int kLongWarps = 8;

// Rows a multiprocessor, for which registers leave room for three blocks: 512 x 16,384 elements in 13.1 us, by two in 13.6, in
// fp32 in 14.7. Many rows read 0.983 by two there, 0.977 by three; of shorter ones the same.
constexpr int64_t kFewPacked = 8;

// Those that a warp can hold are its.
inline bool plan_packed(SoftmaxPlan& plan, const SoftmaxForwardProblem& p, const Device& device) {
  if (p.element_size != 2 || p.fp16) return false;
  const int64_t vectors = p.n / 8, each = divide_up(vectors, kPackedVectors), threads = divide_up(each, kWarp) * kWarp;
  if (!(p.scale > 0) || each <= kWarp || threads > kMostThreads || !packs(threads, vectors)) return false;
  plan.kernel = SoftmaxKernel::packed, plan.held = kPackedVectors;
  plan.reason = "registers hold a row of 16 bits as it came, so that more rows are on their way";
  plan.blocks = p.rows <= kFewPacked * device.processors ? 3 : 2;
  plan.shape = {p.rows, int(threads), 1, 1, 0};
  return true;
}

inline bool plan_tiled(SoftmaxPlan& plan, const SoftmaxForwardProblem& p, const Device& device) {
  if (p.fp16) return false;
  const int size = 16 / p.element_size, offsets = p.x_at % 16 + p.y_at % 16;
  const bool vectors = p.n % size == 0 && offsets == 0;
  const Tiling tiles =
      vectors ? plan_vector_tiles(p.element_size, p.rows, p.n, most_held_forward(p.element_size), 1, device)
              : plan_tiles(p.element_size, p.rows, p.n, offsets, 1, device);
  if (tiles.threads == 0) return false;
  shape_tiles(plan, vectors ? SoftmaxKernel::tiled_vectors : SoftmaxKernel::tiled, tiles);
  plan.held = vectors ? most_held_forward(p.element_size) : p.n <= kWarp * kFewTiled ? kFewTiled : kManyTiled;
  return true;
}

inline bool plan_long(SoftmaxPlan& plan, const SoftmaxForwardProblem& p, bool aligned, const Device& device) {
  if (p.x_at % 16 != p.y_at % 16 || p.scale <= 0 || p.n <= (aligned ? kLongRow : kLongestTiled)) return false;
  Waiting layout = plan_waiting_together(p.element_size, p.n, 1, device);
  const bool together = !aligned && !p.fp16 && layout.threads > 0;
  const Lines lines = lines_of(p.element_size, p.n, p.x_at, p.y_at, p.y_at);
  if (!together) {
    const int64_t most = aligned ? block_bytes(p.element_size) : kOddBlockBytes;
    layout = plan_waiting(p.element_size, p.rows, p.n, lines, 1, forward_room(p.element_size), device, most);
  }
  if (layout.threads == 0) return false;
  const int64_t vectors = vectors_of(p.element_size, p.n, lines);
  const int64_t long_part = vectors / (int64_t(layout.cluster) * kLongWarps);
  if (p.element_size == 4 && aligned && layout.cluster > kMaxCluster && layout.threads > kLongWarps * kWarp &&
      long_part <= kPartSlots / 2) {
    layout.threads = kLongWarps * kWarp;
    layout.part = int(divide_up(divide_up(vectors, layout.cluster * kLongWarps), 8) * 8);
    layout.bytes = size_t(layout.part * kLongWarps * 16);
  }
  shape_waiting(plan, p.rows, layout, together ? 16 : lines.bytes, together, Refused::of_rules);
  return true;
}

// As the table has it, or who measures: aligned rows, but for those that wait.
inline bool plan_requested(SoftmaxPlan& plan, const SoftmaxForwardProblem& p, const RowChoice& requested, Refused refused,
                           const Device& device) {
  if (requested.kernel == RowKernel::packed) return plan_packed(plan, p, device);
  if (requested.kernel == RowKernel::tiles) return plan_tiled(plan, p, device);
  if (requested.kernel != RowKernel::copied || p.scale <= 0 || refused != Refused::nothing) return false;
  const Lines lines = lines_of(p.element_size, p.n, p.x_at, p.y_at, p.y_at);
  const Waiting layout =
      requested_waiting(p.element_size, requested, p.n, lines, 1, forward_room(p.element_size), device);
  if (layout.threads == 0) return false;
  shape_waiting(plan, p.rows, layout, lines.bytes, false, Refused::of_table);
  return true;
}

// Under a mask or causal, in registers; false for rows that these do not take.
inline bool plan_masked(SoftmaxPlan& plan, const SoftmaxForwardProblem& p, bool aligned, const Device& device) {
  const int64_t vectors = p.n / (16 / p.element_size);
  if (!aligned || p.fp16 || (p.masked && !p.mask_vectors) || vectors > kMostHeldMasked * kMostThreads) return false;
  const RowPlan layout = plan_spread(p.rows, vectors, 1, kMostHeldMasked, 1, device);
  shape_rows(plan, p.rows, layout);
  plan.kernel = SoftmaxKernel::masked, plan.shape.cluster = 1;
  plan.reason = "the row is masked or causal, and registers hold it";
  plan.held = layout.held > 2 ? kMostHeldMasked : layout.held;
  return true;
}

}  // namespace softmax_plans

inline SoftmaxPlan plan_softmax_forward(const SoftmaxForwardProblem& p, const Device& device,
                                        Refused refused = Refused::nothing) {
  using namespace softmax_plans;
  SoftmaxPlan plan;
  const int size = 16 / p.element_size, most = most_held_forward(p.element_size);
  const bool aligned = p.n % size == 0 && p.x_at % 16 == 0 && p.y_at % 16 == 0, plain = aligned && !p.masked;
  const bool bare = !p.causal && !p.masked, measuring = row_overrides[FUSELINE_SOFTMAX_FORWARD].given;
  if (!bare && plan_masked(plan, p, aligned, device)) return plan;
  const RowChoice* const choice = choice_for(FUSELINE_SOFTMAX_FORWARD, p.element_size, p.n);
  const bool waits = choice && choice->kernel == RowKernel::copied && p.x_at % 16 == p.y_at % 16;
  if ((plain || waits) && bare && choice && choice->kernel != RowKernel::rules &&
      (measuring || are_many(p.rows, p.rows * p.n * p.element_size, device))) {
    if (plan_requested(plan, p, *choice, refused, device) || measuring) return plan;
  }
  if (plain && bare && !measuring && p.element_size == 2 && !p.fp16 && p.scale > 0) {
    const FewRows few = plan_few_rows(p.rows, p.n / size, true, device);
    if (few.held > 0) return shape_few(plan, p.rows, few), plan;
  }
  RowPlan layout = plan_few_softmax(p.rows, p.n / size, most, device);
  const bool few = plain && !measuring && layout.fits;
  if (bare && !few && !measuring) {
    if (plain && plan_packed(plan, p, device)) return plan;
    if (plan_tiled(plan, p, device)) return plan;
    if (refused != Refused::of_rules && plan_long(plan, p, plain, device)) return plan;
  }
  if (!few) layout = plan_rows(FUSELINE_SOFTMAX_FORWARD, p.element_size, p.rows, p.n, plain, false, most, device);
  shape_layout(plan, p.rows, layout, plain, most);
  return plan;
}

// ---- backward ----

namespace softmax_plans {

// Many rows of fp32 wait earlier: at 16,384 in 271.2 us, in registers in 293.7.
constexpr int64_t kLongRowOfMany = 8192;
constexpr int64_t kManyRows = 8;  // are more than these a multiprocessor

inline bool alike(const SoftmaxBackwardProblem& p) {
  return p.y_at % 16 == p.grad_out_at % 16 && p.grad_x_at % 16 == p.grad_out_at % 16;
}

inline bool plan_tiled(SoftmaxPlan& plan, const SoftmaxBackwardProblem& p, const Device& device) {
  if (p.fp16) return false;
  const int offsets = p.grad_out_at % 16 + p.y_at % 16 + p.grad_x_at % 16;
  const bool vectors = p.n % (16 / p.element_size) == 0 && offsets == 0;
  const Tiling tiles = vectors ? plan_vector_tiles(p.element_size, p.rows, p.n, kMostHeldBackward, 2, device)
                               : plan_tiles(p.element_size, p.rows, p.n, offsets, 2, device);
  if (tiles.threads == 0) return false;
  shape_tiles(plan, vectors ? SoftmaxKernel::tiled_vectors : SoftmaxKernel::tiled, tiles);
  return true;
}

inline bool plan_long(SoftmaxPlan& plan, const SoftmaxBackwardProblem& p, bool aligned, const Device& device) {
  const int64_t long_row = p.element_size == 4 && p.rows > kManyRows * device.processors ? kLongRowOfMany : kLongRow;
  if (!alike(p) || p.n <= (aligned ? long_row : kLongestTiled)) return false;
  Waiting layout = plan_waiting_together(p.element_size, p.n, 2, device);
  const bool together = !aligned && !p.fp16 && layout.threads > 0;
  const Lines lines = lines_of(p.element_size, p.n, p.grad_out_at, p.y_at, p.grad_x_at);
  if (!together) layout = plan_waiting(p.element_size, p.rows, p.n, lines, 2, backward_room(), device);
  if (layout.threads == 0) return false;
  shape_waiting(plan, p.rows, layout, together ? 16 : lines.bytes, together, Refused::of_rules);
  return true;
}

inline bool plan_requested(SoftmaxPlan& plan, const SoftmaxBackwardProblem& p, const RowChoice& requested, Refused refused,
                           const Device& device) {
  if (requested.kernel == RowKernel::tiles) return plan_tiled(plan, p, device);
  if (requested.kernel != RowKernel::copied || refused != Refused::nothing) return false;
  const Lines lines = lines_of(p.element_size, p.n, p.grad_out_at, p.y_at, p.grad_x_at);
  const Waiting layout =
      requested_waiting(p.element_size, requested, p.n, lines, 2, backward_room(), device);
  if (layout.threads == 0) return false;
  shape_waiting(plan, p.rows, layout, lines.bytes, false, Refused::of_table);
  return true;
}

}  // namespace softmax_plans

inline SoftmaxPlan plan_softmax_backward(const SoftmaxBackwardProblem& p, const Device& device,
                                         Refused refused = Refused::nothing) {
  using namespace softmax_plans;
  SoftmaxPlan plan;
  const int size = 16 / p.element_size;
  const bool aligned = p.n % size == 0 && p.grad_out_at % 16 == 0 && alike(p);
  const bool measuring = row_overrides[FUSELINE_SOFTMAX_BACKWARD].given;
  const RowChoice* const choice = choice_for(FUSELINE_SOFTMAX_BACKWARD, p.element_size, p.n);
  const bool waits = choice && choice->kernel == RowKernel::copied && alike(p);
  if ((aligned || waits) && choice && choice->kernel != RowKernel::rules &&
      (measuring || are_many(p.rows, p.rows * p.n * p.element_size, device))) {
    if (plan_requested(plan, p, *choice, refused, device) || measuring) return plan;
  }
  if (aligned && !measuring && !p.fp16) {
    const FewRows few = plan_few_rows(p.rows, p.n / size, false, device);
    if (few.held > 0) return shape_few(plan, p.rows, few), plan;
  }
  RowPlan layout = plan_few_softmax(p.rows, p.n / size, kMostHeldBackward, device);
  const bool few = aligned && !measuring && layout.fits;
  if (!few && !measuring) {
    if (plan_tiled(plan, p, device)) return plan;
    if (refused != Refused::of_rules && plan_long(plan, p, aligned, device)) return plan;
  }
  if (!few) {
    layout = plan_rows(FUSELINE_SOFTMAX_BACKWARD, p.element_size, p.rows, p.n, aligned, false, kMostHeldBackward, device);
  }
  shape_layout(plan, p.rows, layout, aligned, kMostHeldBackward);
  return plan;
}

}  // namespace fuseline
