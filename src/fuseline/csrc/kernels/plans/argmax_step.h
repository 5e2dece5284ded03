// How many blocks share a row of logits at the end of a decoding step: the one place that decides. step/argmax_step.cu launches
// what the plan says.
#pragma once

#include "device.h"

namespace fuseline {

struct ArgmaxStepPlan {
  const char* reason = "a block has a row";
  LaunchShape shape;
};

inline ArgmaxStepPlan plan_argmax_step(int64_t rows, int64_t n, int element_size, const Device& device) {
  const int64_t vectors = divide_up(n, 16 / element_size);
  int cluster = 1;
  while (device.clusters && cluster < kMaxCluster && vectors > int64_t(cluster) * kMostThreads &&
         rows * cluster * 2 <= device.processors) {
    cluster *= 2;
  }
  const int64_t threads = divide_up(divide_up(vectors, cluster), kWarp) * kWarp;
  ArgmaxStepPlan plan;
  if (cluster > 1) plan.reason = "rows are so few and long that blocks of a cluster share one";
  plan.shape = {rows * cluster, int(std::min<int64_t>(threads, kMostThreads)), 1, cluster, 0};
  return plan;
}

}  // namespace fuseline
