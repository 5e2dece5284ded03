// How y = activation(gate) * up and its gradients run: the one place that decides. glu.cu launches what the plan says, and
// `fuseline explain swiglu` prints it.
#pragma once

#include "elementwise.h"

namespace fuseline {

constexpr int kGluAccess = 8;                       // bytes
constexpr int64_t kMostDivided = int64_t(1) << 31;  // elements of a launch whose rows have gaps

struct GluProblem {
  int element_size;
  int64_t rows, n;
  bool gaps;   // between the rows of a tensor: it is half of a larger one
  bool whole;  // all addresses and gaps are multiples of 8 bytes
};

struct GluPlan {
  const char* reason = "";
  LaunchShape shape;         // of the first launch
  int wide = 1;              // elements of an access
  int64_t rows_at_once = 0;  // of a launch
};

inline LaunchShape shape_of_glu(int element_size, int64_t elements, const Device& device) {
  const int64_t threads = divide_up(elements, kGluAccess / element_size);
  const int block = block_for(threads, device);
  return {divide_up(threads, block), block, 1, 1, 0};
}

inline GluPlan plan_glu(const GluProblem& p, const Device& device) {
  GluPlan plan;
  const int half = kGluAccess / p.element_size;
  const bool vectors = p.whole && (!p.gaps || p.n % half == 0);
  plan.wide = vectors ? half : 1;
  plan.reason = vectors ? "each element is computed alone, in accesses of 8 bytes"
                        : "each element is computed alone; rows do not all begin at 8 bytes";
  plan.rows_at_once = p.gaps ? std::max<int64_t>(1, kMostDivided / p.n) : p.rows;
  plan.shape = shape_of_glu(p.element_size, std::min(p.rows, plan.rows_at_once) * p.n, device);
  return plan;
}

}  // namespace fuseline
