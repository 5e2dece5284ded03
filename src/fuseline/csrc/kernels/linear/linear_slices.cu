// 5 to 32 rows of activations times quantized weights: slices. See linear/linear_slices.cuh.

#include "linear_slices.cuh"

namespace fuseline {
namespace {

struct SlicesPlan {
  int splits = 0, warps = 0, rounds = 0;  // blocks of a cluster, warps of a block, tiles of a warp
  int clusters = 0, shared = 0;
  double us = 0;
};

constexpr int kMostRounds = 6, kLeastWarps = 9;

// Of shared memory: of a block at least, for no second one beside it; and of barriers, at most.
int least_shared(const Device& device) { return device.shared_a_processor / 2; }
constexpr int kBarriers = 1024;

// What fills `a` for a plan; answers the bytes of shared memory.
template <class Weights, int kColumnBlocks>
int64_t deal_slices(LinearArguments& a, const SlicesPlan& plan, const Device& device) {
  a.splits = plan.splits, a.units = plan.clusters;
  a.base = a.tiles / a.units, a.extra = a.tiles % a.units;
  a.steps = int(divide_up(a.chunks, kSliceChunks<Weights>));
  a.steps_a_split = int(divide_up(a.steps, a.splits));
  const int64_t own = divide_up((a.base + (a.extra > 0)) * kColumnBlocks, a.splits);
  const int64_t x = int64_t(8 * kColumnBlocks) * x_pitch(a.steps_a_split * kSliceChunks<Weights>);
  const int64_t sums = own * a.splits * (kWarp * 16);
  a.x_bytes = int(std::min<int64_t>(x, 1 << 24)), a.scale_bytes = int(std::min<int64_t>(sums, 1 << 24));
  return std::max<int64_t>(x + sums + own * kTileRows * 8, least_shared(device));
}

// By microseconds, the bytes' own apart. The constants were fitted to 200 plans of 26 products, 8 to 32 rows by 4096 to 14336
// columns; what it takes is 0.6% slower than the best of each on average. us beside 16 rows of int8 by blocks of a
// cluster, warps and rounds: 4096 x 12288 2 x 12 x 1 18.7, 4 x 13 x 2 19.5, 8 x 13 x 4 20.1; 11008 x 4096, nothing asked of
// the L2 ahead, 8 x 9 x 2 19.6, 4 x 9 x 1 20.9.
template <class T, class Weights, int kColumnBlocks>
SlicesPlan plan_slices(const LinearArguments& given, const fuseline_linear& call, const Device& device) {
  constexpr bool kInt4 = Weights::kGrouped;
  constexpr double kX = (kInt4 ? 0.75 : kColumnBlocks == 4 ? 0.52 : kColumnBlocks == 2 ? 1.29 : 2.) / 40960;
  constexpr double kRound = kInt4 ? 0.3 : 0.4, kStep = kInt4 ? 0.083 : 0.071;
  SlicesPlan best;
  for (int splits = 2; splits <= kMaxCluster; ++splits) {
    if (call.splits ? call.splits != splits : (splits & (splits - 1)) != 0) continue;
    int clusters = 0;
    const auto kernel = linear_slices_kernel<T, Weights, kColumnBlocks>;
    const cudaError_t error =
        resident_clusters(kernel, device, kSliceWarps * kWarp, size_t(least_shared(device)), splits, clusters);
    if (error != cudaSuccess) cudaGetLastError();  // no machine code for this device
    if (error != cudaSuccess || clusters == 0) continue;
    for (int rounds = 1; rounds <= kMostRounds; ++rounds) {
      SlicesPlan plan{splits, int(divide_up(given.tiles, clusters * rounds)), rounds};
      if (plan.warps > kSliceWarps || (plan.warps < kLeastWarps && !call.splits)) continue;
      plan.clusters = int(divide_up(given.tiles, plan.warps * rounds));
      LinearArguments a = given;
      const int64_t shared = deal_slices<Weights, kColumnBlocks>(a, plan, device);
      if (shared > device.shared_a_block - kBarriers || a.steps < splits) continue;
      plan.shared = int(shared);
      const int steps = (a.base + (a.extra > 0)) * a.steps_a_split;  // of a block, 1 KB each
      plan.us = 0.022 * steps + kX * a.x_bytes + kRound * rounds + kStep * rounds * a.steps_a_split + 0.013 * splits;
      if (best.splits == 0 || plan.us < best.us) best = plan;
    }
  }
  return best;
}

template <class T, class Weights, int kColumnBlocks>
int launch_slices(LinearArguments a, const fuseline_linear& call, const Device& device, void* stream) {
  const SlicesPlan plan = plan_slices<T, Weights, kColumnBlocks>(a, call, device);
  if (plan.splits == 0) return FUSELINE_UNSUPPORTED;
  deal_slices<Weights, kColumnBlocks>(a, plan, device);
  // Steps of a warp that the L2 is asked for: us of 4096 x 12288 beside 16 rows for 0, 4, 8 and 14 of 32 20.2, 19.1, 18.7 and
  // 19.6, of 4096 x 6144, where a warp has 16, 11.7, 11.4, 12.2 and 12.9. In int4 0 is the best.
  a.prefetched = Weights::kGrouped ? 0 : std::min(8, plan.rounds * a.steps_a_split / 4);
  a.y_pairs = a.n % 2 == 0 && reinterpret_cast<uintptr_t>(a.y) % 4 == 0;
  const auto kernel = linear_slices_kernel<T, Weights, kColumnBlocks>;
  if (plan.shared > least_shared(device)) {  // which the kernel has been allowed
    int clusters = 0;
    const cudaError_t error =
        resident_clusters(kernel, device, plan.warps * kWarp, size_t(plan.shared), plan.splits, clusters);
    if (error != cudaSuccess) return int(error);
  }
  static thread_local int asked = -1;
  if (asked != device.index) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return int(error);
    asked = device.index;
  }
  return launch_overlapping(kernel, a, dim3(unsigned(plan.clusters * plan.splits)), plan.warps * kWarp, size_t(plan.shared),
                            plan.splits, stream);
}

// Where slices were faster than streams and tiles: see docs/experiments/linears.md. Rows of x at odd addresses each block puts in order
// itself, where tiles want a launch ahead for that.
bool slices_win(const LinearArguments& a, bool int4) {
  constexpr int64_t kMi = 1 << 20;
  const int64_t weights = int64_t(a.n) * a.k;
  if (weights < 16 * kMi || weights > 120 * kMi) return false;
  if (int4) return a.m > 8 && a.m <= 16;
  if (a.m > 16) return a.k <= 8192 && weights >= 40 * kMi && weights <= 96 * kMi;
  return a.m > (a.x_vectors ? 4 : 2) && !(a.m <= 8 && a.next_weight);
}

template <class T>
int launch_slices(const LinearArguments& a, const fuseline_linear& call, const Device& device, void* stream) {
  if (call.format == FUSELINE_WEIGHT_INT4) return launch_slices<T, WeightsInt4, 2>(a, call, device, stream);
  if (a.m <= 8) return launch_slices<T, WeightsInt8, 1>(a, call, device, stream);
  if (a.m <= 16) return launch_slices<T, WeightsInt8, 2>(a, call, device, stream);
  return launch_slices<T, WeightsInt8, 4>(a, call, device, stream);
}

}  // namespace

// FUSELINE_UNSUPPORTED for what may stand around the product, and where others are faster.
int run_slices(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  const bool int4 = call.format == FUSELINE_WEIGHT_INT4;
  if (a.norm || a.activation || a.residual || a.k == 0 || a.m > (int4 ? 16 : 32)) return FUSELINE_UNSUPPORTED;
  if (int4 && (a.zeros || a.group_shift < 2)) return FUSELINE_UNSUPPORTED;
  if (!call.kernel && (call.splits || !slices_win(a, int4))) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  if (!device.clusters) return FUSELINE_UNSUPPORTED;
  if (call.dtype == FUSELINE_FLOAT16) return launch_slices<__half>(a, call, device, stream);
  return launch_slices<__nv_bfloat16>(a, call, device, stream);
}

}  // namespace fuseline
