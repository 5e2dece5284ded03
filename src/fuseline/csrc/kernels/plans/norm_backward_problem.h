// What a plan of the norms' backward is made of: norm_backward.h.
#pragma once

#include "norms.h"

namespace fuseline {

enum class NormBackwardKernel {
  apart,      // few and short rows: some blocks have rows, others columns
  few,        // few rows: a cluster has columns of all of them
  tiled,      // short rows, several a copy, through shared memory
  ring,       // rows ahead in shared memory, by blocks that stay
  held,       // registers, by blocks that stay
  general,    // any rows
  unsupported
};

// As profilers show it.
inline const char* name_of(NormBackwardKernel kernel) {
  switch (kernel) {
    case NormBackwardKernel::apart:
      return "norm_backward_apart";
    case NormBackwardKernel::few:
      return "norm_backward_few";
    case NormBackwardKernel::tiled:
      return "norm_backward_tiled";
    case NormBackwardKernel::ring:
      return "norm_backward_ring";
    case NormBackwardKernel::held:
      return "norm_backward_held";
    case NormBackwardKernel::general:
      return "norm_backward_general";
    default:
      return "";
  }
}

// How many sums over rows a kernel makes: of an RMS norm weight's, of a layer norm bias's too, of more x_bias's as well.
constexpr int kSumsOfRmsNorm = 1, kSumsOfLayerNorm = 2, kSumsOfAddedNorm = 3;

struct NormBackwardProblem {
  int x_size, y_size;    // bytes of an element of what was normalized, and of grad_y
  bool fp16;             // grad_y is of fp16, for which there are fewer kernels
  int64_t rows, n;
  bool centred;          // a layer norm
  bool drops;            // there is a mask
  bool normalized;       // x comes as (x - mean) * rstd in grad_y's dtype
  bool weighted;         // there is a weight
  bool fp32_weights;     // weights and their gradients are fp32
  bool rows_aligned;     // tensors of rows begin at multiples of 16 bytes
  bool weight_aligned;   // and so does weight
  bool grad_sum;         // there is a gradient of the sum
  bool grad_x, grad_dropped, grad_weight, grad_bias, grad_x_bias;  // are wanted
  bool over_inputs;      // grad_x or grad_dropped stand where x or grad_y do

  bool wants_rows() const { return grad_x || grad_dropped || grad_x_bias; }
  bool wants_sums() const { return grad_weight || grad_bias || grad_x_bias; }
  // Of the kernels that take it; those of two dtypes have all.
  int sums() const {
    const bool added = grad_sum || grad_dropped || grad_x_bias || (!centred && grad_bias) || x_size > y_size;
    return added ? kSumsOfAddedNorm : centred ? kSumsOfLayerNorm : kSumsOfRmsNorm;
  }
};

// What a block of the kernel of few rows has in shared memory, and where: bytes from its beginning.
struct FewNormRoom {
  int turns, parts, warps;  // rows of a thread, vectors it holds of each, warps side by side in a row
  int terms, columns, states, sums, statistics, bytes;
};

struct NormBackwardPlan {
  NormBackwardKernel kernel = NormBackwardKernel::unsupported;
  const char* reason = "";
  LaunchShape shape;      // of `ring` and `held` with the most blocks: the launcher makes no more than the device holds
  size_t workspace = 0;   // bytes
  int sums = 0;           // over rows, which the kernel makes
  int slots = 0;          // vectors of grad_y that a thread has of a row
  int blocks = 0;         // with partial sums of their own, a cluster counting once; 0: there are none
  int kinds = 0;          // of partial sums that a second kernel adds up
  int stages = 0;         // `ring`, `tiled`: rows or tiles in the ring
  bool neighbors = false; // `ring`: a cluster has rows beside each other
  int width = 0;          // `few`: vectors of a row that a block has
  int across = 0;         // `few`, `apart`: threads side by side in a row
  int rows = 0;           // `few`: of a cluster
  FewNormRoom room{};     // `few`
  int abreast = 0;        // `apart`: vectors of a row that a block of columns has
  int column_blocks = 0;  // `apart`, `general`: that have the sums
  int sum_column_blocks = 0;  // `apart`: of a second launch, for the sums of x_bias's gradient
  int shares = 0;         // `general`: blocks that share the rows of a column
};

namespace norm_backward_plans {

using namespace norm_plans;

inline int64_t columns_of_partials(int64_t n) { return (n + 3) / 4 * 4; }
inline bool is_added(const NormBackwardProblem& p) { return p.sums() == kSumsOfAddedNorm; }
inline bool is_mixed(const NormBackwardProblem& p) { return p.x_size > p.y_size; }
inline bool has_rings_alone(const NormBackwardProblem& p) { return p.fp16 && !is_mixed(p); }
// Bytes of an element of x, grad_y and the gradient of a sum.
inline int bytes_ahead(const NormBackwardProblem& p, bool added) {
  return (p.normalized ? p.y_size : p.x_size) + p.y_size + (added ? p.x_size : 0);
}
inline int64_t vectors_of(const NormBackwardProblem& p) { return divide_up(p.n, 16 / p.y_size); }
inline bool in_vectors(const NormBackwardProblem& p) {
  return p.n % (16 / p.y_size) == 0 && p.rows_aligned && p.weight_aligned;
}

// Partial sums of `blocks` blocks, which a second kernel adds up.
inline void leave_sums(NormBackwardPlan& plan, const NormBackwardProblem& p, int kinds, int64_t blocks) {
  if (!p.wants_sums()) return;
  plan.blocks = int(blocks), plan.kinds = kinds;
  plan.workspace = size_t(kinds * blocks * columns_of_partials(p.n)) * sizeof(float);
}

}  // namespace norm_backward_plans
}  // namespace fuseline
