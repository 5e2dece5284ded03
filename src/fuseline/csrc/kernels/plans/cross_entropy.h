// Which kernel takes a cross-entropy of logits, and how: the one place that decides. cross_entropy.cu launches what the plan
// says, and `fuseline explain cross_entropy` prints it.
#pragma once

#include "waiting.h"

namespace fuseline {

enum class CrossEntropyKernel {
  unsupported,  // no kernel
  short_rows,   // a warp a row of some hundred vectors at most, which it reads once
  waiting,      // shared memory, in bulk copies
  passing,      // the losses alone: nothing of a row is wanted twice
  rows,         // registers of a warp
  streamed      // the row is read twice
};

// As profilers show it.
inline const char* name_of(CrossEntropyKernel kernel) {
  switch (kernel) {
    case CrossEntropyKernel::short_rows:
      return "cross_entropy_short";
    case CrossEntropyKernel::waiting:
      return "cross_entropy_waiting";
    case CrossEntropyKernel::passing:
      return "cross_entropy_passing";
    case CrossEntropyKernel::rows:
      return "cross_entropy_rows";
    case CrossEntropyKernel::streamed:
      return "cross_entropy_streamed";
    default:
      return "";
  }
}

struct CrossEntropyProblem {
  int element_size;
  int64_t rows, n, width;  // n of the `width` columns of a row count
  int logits_at, grad_at;  // addresses modulo 128; grad_at is 0 without a gradient
  bool grad;               // the gradient is written, too
  bool plain;              // without cap, label smoothing and class weights
  bool fp16 = false;       // no model needs more of it than the kernels that take any row
};

struct CrossEntropyPlan {
  CrossEntropyKernel kernel = CrossEntropyKernel::unsupported;
  const char* reason = "";
  LaunchShape shape;
  int64_t held = 0;  // 16-byte vectors that a thread holds
  int part = 0;      // slots of a warp's part of a row that waits
  int line = 0;      // bytes, at which the parts of rows that wait begin
  Refused refusable = Refused::nothing;  // what is refused if the device does not hold this plan
};

namespace cross_entropy_plans {

constexpr int kShortBlock = 128;      // threads: a row a warp
constexpr int64_t kShortRow = 1024;   // up to which a warp's registers hold a row
constexpr int kMostPassing = 512, kFewerPassing = 256;  // threads of a row that passes
constexpr int most_held(int element_size) { return 2 * element_size; }

// The kernels check this.
constexpr size_t room(int element_size, bool plain) { return waiting_room(plain && element_size == 2 ? 8 : 16); }

// Shorter rows would leave lanes idle, or their vectors.
inline bool plan_short(CrossEntropyPlan& plan, const CrossEntropyProblem& p) {
  const int size = 16 / p.element_size;
  const int64_t vectors = p.n / size;
  const bool aligned = p.n % size == 0 && p.logits_at % 16 == 0 && p.grad_at % 16 == 0;
  const int fewest = p.element_size == 4 ? kWarp / 2 : 2 * kWarp;
  if (p.fp16 || !p.plain || p.n != p.width || !aligned || vectors <= fewest || vectors > kWarp * 32 / size) return false;
  plan.kernel = CrossEntropyKernel::short_rows, plan.held = divide_up(vectors, kWarp);
  plan.reason = "a warp's registers hold an aligned row";
  plan.shape = {divide_up(p.rows, kShortBlock / kWarp), kWarp, kShortBlock / kWarp, 1, 0};
  return true;
}

inline bool shape_waiting(CrossEntropyPlan& plan, const CrossEntropyProblem& p, const Waiting& layout, int line,
                          Refused if_refused) {
  if (layout.threads == 0) return false;
  plan.kernel = CrossEntropyKernel::waiting, plan.part = layout.part, plan.line = line, plan.refusable = if_refused;
  plan.reason = if_refused == Refused::of_table ? "the table of measured layouts has the row wait in shared memory"
                                                : "registers do not hold the row: it waits in shared memory";
  plan.shape = shape_of(layout, p.rows);
  return true;
}

inline Lines lines(const CrossEntropyProblem& p) {
  return lines_of(p.element_size, p.width, p.logits_at, p.logits_at, p.grad ? p.grad_at : p.logits_at);
}

inline bool grad_in_vectors(const CrossEntropyProblem& p) { return p.logits_at % 16 == p.grad_at % 16; }

inline bool plan_requested(CrossEntropyPlan& plan, const CrossEntropyProblem& p, const RowChoice& requested, Refused refused,
                           const Device& device) {
  if (refused != Refused::nothing || (p.grad && !grad_in_vectors(p))) return false;
  const Lines of = lines(p);
  const Waiting layout =
      requested_waiting(p.element_size, requested, p.width, of, 1, room(p.element_size, p.plain), device);
  return shape_waiting(plan, p, layout, of.bytes, Refused::of_table);
}

// Long rows; false if they fit no cluster.
inline bool plan_long(CrossEntropyPlan& plan, const CrossEntropyProblem& p, Refused refused, const Device& device) {
  if (p.width <= kShortRow || (p.grad && !grad_in_vectors(p))) return false;
  if (p.plain && !p.fp16 && !p.grad && p.rows >= 2 * device.processors) {
    constexpr int64_t kVectors = 2 * kPiece * kMostPassing;
    const int threads = p.width >= kVectors * (16 / p.element_size) ? kMostPassing : kFewerPassing;
    plan.kernel = CrossEntropyKernel::passing, plan.shape = {p.rows, threads, 1, 1, 0};
    plan.reason = "the losses alone are wanted, so that nothing of a row is wanted twice";
    return true;
  }
  if (refused == Refused::of_rules) return false;
  const Lines of = lines(p);
  const Waiting layout =
      plan_waiting(p.element_size, p.rows, p.width, of, 1, room(p.element_size, p.plain), device);
  return shape_waiting(plan, p, layout, of.bytes, Refused::of_rules);
}

}  // namespace cross_entropy_plans

inline CrossEntropyPlan plan_cross_entropy(const CrossEntropyProblem& p, const Device& device,
                                           Refused refused = Refused::nothing) {
  using namespace cross_entropy_plans;
  CrossEntropyPlan plan;
  const bool measuring = row_overrides[FUSELINE_CROSS_ENTROPY].given;
  if (!measuring && plan_short(plan, p)) return plan;
  const RowChoice* const choice = choice_for(FUSELINE_CROSS_ENTROPY, p.element_size, p.width);
  if (choice && choice->kernel == RowKernel::copied && p.grad &&
      (measuring || are_many(p.rows, p.rows * p.width * p.element_size, device))) {
    if (plan_requested(plan, p, *choice, refused, device) || measuring) return plan;
  }
  if (!measuring && plan_long(plan, p, refused, device)) return plan;
  const bool aligned = p.width % (16 / p.element_size) == 0 && p.logits_at % 16 == 0;
  const int most = most_held(p.element_size);
  const RowPlan layout =
      plan_rows(FUSELINE_CROSS_ENTROPY, p.element_size, p.rows, p.width, aligned, false, most, device);
  if (!layout.fits || (measuring && !layout.one_warp)) return plan;
  if (!layout.one_warp) {
    plan.kernel = CrossEntropyKernel::streamed, plan.shape = {p.rows, kMostThreads, 1, 1, 0};
    plan.reason = "no layout holds the row: it is read once for the loss and once more for the gradient";
  } else if (layout.held == most || layout.held == 1) {
    plan.kernel = CrossEntropyKernel::rows, plan.held = layout.held;
    plan.reason = "a warp's registers hold the row";
    plan.shape = {grid_for(layout, p.rows), layout.threads, layout.rows, 1, 0};
  }
  return plan;
}

}  // namespace fuseline
