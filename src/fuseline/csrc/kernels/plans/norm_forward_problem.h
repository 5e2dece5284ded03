// What a plan of the norms' forward is made of: norm_forward.h.
#pragma once

#include "norms.h"

namespace fuseline {

enum class NormForwardKernel {
  unsupported,  // no kernel
  held,         // registers of a warp, a block or a cluster
  packed,       // registers, as the row came
  few,          // registers, a block a row and a vector a thread
  fetched,      // shared memory, in bulk copies
  added,        // a 16-bit branch and its fp32 stream, through rings in shared memory
  rows,         // registers, of two dtypes or at any address
  waiting,      // shared memory, filled by each thread for itself
  streamed      // the row is read twice
};

// As profilers show it.
inline const char* name_of(NormForwardKernel kernel) {
  switch (kernel) {
    case NormForwardKernel::held:
      return "norm_forward_held";
    case NormForwardKernel::packed:
      return "norm_forward_packed";
    case NormForwardKernel::few:
      return "norm_forward_few";
    case NormForwardKernel::fetched:
      return "norm_forward_fetched";
    case NormForwardKernel::added:
      return "norm_forward_added";
    case NormForwardKernel::rows:
      return "norm_forward_rows";
    case NormForwardKernel::waiting:
      return "norm_forward_waiting";
    case NormForwardKernel::streamed:
      return "norm_forward_streamed";
    default:
      return "";
  }
}

struct NormForwardProblem {
  int x_size, y_size;    // bytes of an element of what is normalized, and of y
  bool fp16;             // y is of fp16, for which there are fewer kernels
  int64_t rows, n;
  bool centred;          // a layer norm
  NormOf of;
  bool drops;            // there is a mask
  bool fp32_weights;     // weight or bias have more bits than y
  bool rows_aligned;     // tensors of rows begin at multiples of 16 bytes
  bool weights_aligned;  // and so do weight, bias and x_bias
};

struct NormForwardPlan {
  NormForwardKernel kernel = NormForwardKernel::unsupported;
  const char* reason = "";
  LaunchShape shape;
  int held = 0;           // vectors, or slots, that a thread holds
  bool one_warp = false;  // `held`, `rows`: the threads of a row are of one warp
  bool early = false;     // `held`: four vectors of the weights are fetched together with the row
  int turns = 1;          // `held`: rows that a thread has, one after the other
  bool vectors = false;   // `rows`: they keep to 16-byte steps
  int part = 0;           // `fetched`: vectors of a warp's part of a row
  bool light = false;     // `fetched`: threads have fewer registers
  bool leaves = false;    // `fetched`: x leaves the L2 before what is written
  int stages = 0;         // `added`: rows in a warp's ring
  int64_t turns_of_all = 0;  // `added`: of all groups together; the launcher makes as many blocks stay as the device holds
};

namespace norm_forward_plans {

using namespace norm_plans;

inline int64_t vectors_of(const NormForwardProblem& p) { return p.n / (16 / p.y_size); }
inline bool is_added(const NormForwardProblem& p) { return p.of != NormOf::x; }
inline bool is_masked(const NormForwardProblem& p) { return p.of == NormOf::masked_sum; }
inline int tensors_of(const NormForwardProblem& p) { return is_added(p) ? 2 : 1; }

}  // namespace norm_forward_plans
}  // namespace fuseline
