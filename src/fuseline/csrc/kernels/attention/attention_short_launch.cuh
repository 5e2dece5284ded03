// Attention over short sequences, the host's half: what kernels know of their tiles (plans/attention_short.h), and the launch.
#pragma once

#include "attention_short.cuh"
#include "attention_short_products.cuh"
#include "attention_short_turns.cuh"
#include "plans/attention.h"

namespace fuseline::short_attention {

static_assert(Turns::kBytes == kTurnBytes && Blocks<kLongest, true>::kBytes == block_bytes(kLongest));

template <int kS, int kD>
struct Held {
  static constexpr bool kOneRoom = one_room(kS), kForwardAhead = forward_ahead(kS, kD);
  static constexpr bool kQueriesAhead = queries_ahead(kS, kD), kGradientsAhead = gradients_ahead(kS, kD);
  static constexpr int kForwardBytes = forward_bytes(kS, kD), kBackwardBytes = backward_bytes(kS, kD);
};

// Of the plan's blocks those stay that the device holds, each taking problem after problem: by the counter, if there is one and
// more problems than blocks. They come while the kernel before ends (overlap.cuh).
inline int launch_problems(void (*kernel)(ShortAttention), const ShortAttention& a, const AttentionLaunch& by, void* stream) {
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  LaunchShape shape = by.shape;
  int count = 0;
  error = resident_clusters(kernel, device, shape.threads, shape.shared, 1, count);
  if (error != cudaSuccess) return int(error);
  if (count == 0) return FUSELINE_UNSUPPORTED;
  ShortAttention given = a;
  if (a.problems <= count) given.counter = nullptr;
  shape.grid = std::min<int64_t>(shape.grid, count);
  return launch(kernel, given, shape, device, stream);
}

// attention_short_forward.cu and attention_short_backward.cu have them in bf16 for problems of up to 64 rows and keys,
// attention_short_not_sm90.cu for longer ones and in fp16.
template <class T, int kS>
int forward_of(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template <class T, int kS>
int backward_of(const ShortAttention& a, const AttentionPlan& plan, void* stream);
// attention_short_sm90a.cu: by products of warpgroups (attention_short_wgmma.cuh), in bf16.
int launch_by_warpgroups(const ShortAttention& a, const AttentionLaunch& by, void* stream);

}  // namespace fuseline::short_attention
