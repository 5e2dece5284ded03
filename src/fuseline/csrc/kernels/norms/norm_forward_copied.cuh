// The host's half of the norms' forward of rows that come to shared memory in bulk copies (sm_90): short ones at odd
// addresses (norm_forward_tiled.cuh), and long ones (norm_forward_fetched.cuh).
#pragma once

#include "rows/choice.h"
#include "norm_forward_fetched.cuh"
#include "norm_forward_tiled.cuh"

namespace fuseline {

constexpr int64_t kLongestNorm = 256;  // elements of rows in tiles: of longer ones a thread has too many
constexpr int64_t kFewNorms = 8;       // rows a multiprocessor, for which blocks are small,
constexpr int64_t kMostFewVectors = 2048;  // if they have no more vectors than these
constexpr int kMostLightWarps = 8;     // of a block of few registers
constexpr int64_t kLongSum = 131072, kLongestSum = 262144;  // elements of 16 bits, between which sums have blocks of their own

struct FetchedPlan {
  int cluster = 1, warps = 0;  // blocks of a row, and warps of a block; no warps: none holds it
  int part = 0;                // vectors of a warp's part of each tensor
  size_t bytes = 0;
  bool light = false;          // threads have fewer registers
  bool leaves = false;         // x leaves the L2 first
};

// Of rows of 16 bits with a mask, and of many of fp32 by their bytes, as lines of the table are for x alone: a warp has two
// pieces of a row, or one. Shares of the copy bandwidth at 12,288 elements 0.946 (0.840 by twice the warps; in registers
// 0.934), at 16,384 0.979 (0.967 by half of them; 0.945), 32,768 0.960 (0.936 by twice the blocks, 0.935 the warps; 0.930),
// 65,536 0.948 (0.912 by twice the warps; 0.898), 131,072 0.923 (0.911 by half the blocks of twice the warps), 262,144 0.864
// (0.587 by half the warps).
constexpr RowChoice kMaskedForward2[] = {{15360, Rules{8, 128, 1, 1}},  {16384, Rules{8, 256, 1, 1}},  {32768, Rules{8, 128, 2, 1}},
                                         {65536, Rules{16, 128, 4, 1}}, {131072, Rules{16, 128, 8, 1}}, {262144, Rules{16, 256, 8, 1}}};

inline const RowChoice* masked_choice(int64_t n) {
  if (row_overrides[FUSELINE_LAYER_NORM_FORWARD].given) return &row_overrides[FUSELINE_LAYER_NORM_FORWARD].choice;
  for (const RowChoice& choice : kMaskedForward2) {
    if (n <= choice.longest) return &choice;
  }
  return nullptr;
}

// For rows of `vectors` vectors of `tensors` tensors, of `most` blocks at most. The table is for a layer norm of x alone: a sum
// has as many bytes a block. At 65,536 elements of 16 bits twice the blocks read 0.954 against 0.948 in an RMS norm, 0.938
// against 0.947 in a layer norm. may_leave: x of 16 bits alone, with weights of its dtype. long_sums: of sums of more than
// kLongSum, not masked, which at 262,144 take 383.2 us of RMS norms in 8 blocks of 16 warps and 405.5 of layer norms in 16 of 8,
// by the table 413.7 and 423.8; in 16 of 8 RMS norms 388.4, in 16 of 16 477.2 and layer norms 509.2.
inline FetchedPlan plan_fetched(const RowChoice& choice, int64_t rows, int64_t vectors, int tensors, bool centred,
                                bool may_leave, bool long_sums, int most, int most_warps, const Device& device) {
  FetchedPlan plan;
  plan.cluster = choice.cluster * tensors;
  plan.warps = std::min(choice.block / kWarp, most_warps);
  if (tensors == 1 && !centred && plan.cluster == 4) plan.cluster *= 2;
  const bool given = row_overrides[FUSELINE_LAYER_NORM_FORWARD].given;
  plan.cluster = std::min(plan.cluster, most);
  // Few rows have more blocks each, and more warps.
  while (plan.cluster < kMaxCluster && rows * plan.cluster * 2 <= device.processors) plan.cluster *= 2;
  if (rows * plan.cluster <= device.processors) plan.warps = most_warps;
  const auto part = [&] { return divide_up(divide_up(vectors, plan.cluster * plan.warps), 8) * 8; };
  // Of a few rows a multiprocessor that are not long, as few warps as hold them: 512 x 16,384 elements of 16 bits in 15.3 us,
  // 16.2 by four a block; RMS norms in 14.7 if x leaves the L2 before what is written. At 32,768 the eight of the table take
  // 29.0, two 37.2; at 65,536 four 51.6, two 55.8.
  const bool few = rows > device.processors && rows <= kFewNorms * device.processors && vectors <= kMostFewVectors;
  if (!given && tensors == 1 && few) plan.warps = 2, plan.leaves = !centred && may_leave;
  if (!given && long_sums && rows > device.processors) {
    plan.cluster = centred ? most : kMaxCluster, plan.warps = centred ? 8 : 16;
  }
  while (plan.warps * 2 <= most_warps && part() > kPartSlots) plan.warps *= 2;
  plan.part = int(part());
  plan.bytes = size_t(plan.warps) * (size_t(plan.part) * tensors * 16 + plan.cluster * sizeof(Moments));
  const size_t room = size_t(device.shared_a_block) - sizeof(FetchedBarriers);
  if (plan.part > kPartSlots || plan.bytes > room) plan.warps = 0;
  return plan;
}

// The requested layout; no warps: no block holds it.
inline FetchedPlan plan_requested(const RowChoice& requested, int64_t vectors, int tensors, bool may_be_light, int most_warps,
                                    const Device& device) {
  FetchedPlan plan;
  plan.cluster = requested.cluster, plan.light = requested.kernel == RowKernel::light;
  plan.leaves = requested.stages == 2;
  const int warps = requested.block / kWarp;
  if (plan.cluster < 1 || plan.cluster > kMostBlocks || warps < 1 || warps > most_warps) return plan;
  const bool lightens = may_be_light && warps <= kMostLightWarps && warps * plan.cluster <= kWarp;
  if ((plan.light && !lightens) || requested.held > 0) return plan;
  plan.part = int(divide_up(divide_up(vectors, plan.cluster * warps), 8) * 8);
  plan.bytes = size_t(warps) * (size_t(plan.part) * tensors * 16 + plan.cluster * sizeof(Moments));
  if (plan.part <= kPartSlots && plan.bytes <= size_t(device.shared_a_block) - sizeof(FetchedBarriers)) plan.warps = warps;
  return plan;
}

template <class T, bool kAdded, bool kMasked>
bool run_fetched(NormForward a, int most, const Device& device, void* stream, int& error, const RowChoice* requested) {
  const bool as_masked = kMasked && (sizeof(T) == 2 || a.rows > device.processors);
  const RowChoice* choice = as_masked ? masked_choice(a.n * int64_t(sizeof(T)) / 2) : nullptr;
  if (!choice && !(kMasked && sizeof(T) == 2)) choice = choice_for(FUSELINE_LAYER_NORM_FORWARD, sizeof(T), a.n);
  if (!requested && (!choice || choice->stages == 0)) return false;
  const bool may_be_light = sizeof(T) == 2 && !kAdded && !(a.fp32_weights && (a.weight || a.bias));
  constexpr int kMostWarps = (kMasked ? kMaskedThreads : kMostThreads) / kWarp;
  const bool long_sums = sizeof(T) == 2 && kAdded && !kMasked && a.n > kLongSum && a.n <= kLongestSum;
  constexpr int kTensors = kAdded ? 2 : 1;
  const int64_t vectors = a.n / kVector<T>;
  const FetchedPlan plan =
      requested ? plan_requested(*requested, vectors, kTensors, may_be_light, kMostWarps, device)
           : plan_fetched(*choice, a.rows, vectors, kTensors, a.centred, may_be_light, long_sums, most, kMostWarps, device);
  if (plan.warps == 0) return false;
  auto kernel = norm_forward_fetched<T, kAdded, false, kMasked>;
  if constexpr (sizeof(T) == 2 && !kAdded) {
    if (plan.light) kernel = norm_forward_fetched<T, false, true>;
  }
  int count = 0;
  cudaError_t failed = cudaSuccess;
  if (plan.cluster > kMaxCluster) {
    failed = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (failed == cudaSuccess) {
    failed = resident_clusters(kernel, device, plan.warps * kWarp, plan.bytes, plan.cluster, count);
  }
  if (count == 0 && plan.cluster > kMaxCluster) {  // it grants no such clusters
    return cudaGetLastError(), !requested && run_fetched<T, kAdded, kMasked>(a, kMaxCluster, device, stream, error, nullptr);
  }
  error = int(failed);
  if (failed != cudaSuccess || count == 0) return failed != cudaSuccess;
  a.cluster = plan.cluster;
  error = launch(kernel, FetchedNorm{a, plan.part, plan.leaves}, a.rows * plan.cluster, dim3(plan.warps * kWarp),
                 plan.bytes, plan.cluster, stream, true);
  return true;
}

template <class T, bool kAdded, bool kMasked>
bool run_tiled(const NormForward& a, int offsets, const Device& device, void* stream, int& error) {
  Tiling plan = plan_tiles(sizeof(T), a.rows, a.n, offsets, kAdded ? 2 : 1, device);
  if (plan.threads == 0) return false;
  if (kMasked) plan.bytes += size_t(divide_up(plan.rows * a.n, 8));
  error = launch_tiles(norm_forward_tiled<T, kFewTiled, kAdded, kMasked>, TiledNorm{a, plan.rows}, shape_of(plan), device, stream);
  return true;
}

template <class T, bool kAdded, bool kMasked = false>
bool run_copied(const NormForward& a, const Device& device, void* stream, int& error, const RowChoice* requested) {
  if (!device.clusters || a.n > (int64_t(1) << 30) || (kAdded && (a.x_bias || a.dropout.seed) != kMasked)) return false;
  const int offset = offset_in_vector(a.x);
  int offsets = 0;  // all together
  for (const void* tensor : {a.x, static_cast<const void*>(a.y), kAdded ? a.residual : a.x,
                             kAdded ? static_cast<const void*>(a.sum) : a.x}) {
    if (offset_in_vector(tensor) != offset) return false;
    offsets += offset;
  }
  const bool in_vectors = a.n % kVector<T> == 0 && offset == 0;
  if (requested && (!in_vectors || requested->kernel == RowKernel::tiles)) return false;
  if (!in_vectors) return a.n <= kLongestNorm && run_tiled<T, kAdded, kMasked>(a, offsets, device, stream, error);
  for (const void* weights : {a.weight, a.bias, kMasked ? a.x_bias : nullptr}) {
    if (offset_in_vector(weights) != 0) return false;
  }
  return run_fetched<T, kAdded, kMasked>(a, kMostBlocks, device, stream, error, requested);
}

}  // namespace fuseline
