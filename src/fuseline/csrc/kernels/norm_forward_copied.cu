// The forward of norms whose rows come to shared memory in bulk copies (sm_90), for x of y's dtype: long rows, and rows
// at odd addresses.
#include "device/norm_forward_staying.cuh"
#include "device/norm_forward_tiled.cuh"

namespace fuseline {
namespace {

template <class T>
bool run_tiled(const NormForward& a, const Device& device, void* stream, int& error) {
  const Tiling plan = plan_tiles<T>(a.rows, a.n, offset_in_vector(a.x) + offset_in_vector(a.y), 1, device);
  if (plan.threads == 0) return false;
  error = launch_tiles(norm_forward_tiled<T, kFewTiled>, TiledNorm{a, plan.rows}, plan, device, stream, true);
  return true;
}

struct StayingPlan {
  int cluster = 1, warps = 0;  // blocks of a row, and warps of a block; no warps: none holds it
  int part = 0, stages = 0;
  size_t bytes = 0;
};

// Rows of a block. Those of more than kStays vectors stay: clusters of 16, as many as each part of the device holds, run at
// one speed. Others take a few rows each, or those multiprocessors that are slower hold up the end.
constexpr int64_t kStays = 4096, kRowsEach = 8;

// For rows of `vectors` vectors, of `most` blocks at most. Blocks of 8 warps at most share a multiprocessor.
StayingPlan plan_staying(int64_t rows, int64_t vectors, int most, const Device& device) {
  StayingPlan plan;
  constexpr int64_t kMost = kStayingHeld * kWarp, kMostWarps = kMostThreads / kWarp;
  const bool few = rows < device.processors / 4;
  while (plan.cluster < most && vectors > plan.cluster * kMostWarps / 2 * kMost) plan.cluster *= 2;
  if (vectors > kStays && !few) plan.cluster = most;
  if (vectors > plan.cluster * kMostWarps * kMost) return plan;
  // Few rows have more blocks each, and more warps.
  while (plan.cluster < kMaxCluster && rows * plan.cluster * 2 <= device.processors &&
         vectors >= plan.cluster * kMostWarps * kWarp) {
    plan.cluster *= 2;
  }
  const int64_t each = divide_up(vectors, plan.cluster);
  const bool spread = rows * plan.cluster < device.processors;
  plan.warps = int(std::min(kMostWarps, divide_up(each, spread ? kWarp : kMost)));
  plan.part = int(divide_up(divide_up(vectors, plan.cluster * plan.warps), 8) * 8);
  const int64_t row = int64_t(plan.warps) * plan.part * 16;
  const int64_t states = kMeetings * plan.cluster * plan.warps * int64_t(sizeof(Moments));
  const int64_t beside = states + int64_t(sizeof(StayingBarriers)) + 1024;  // the system's part
  const int64_t blocks = std::max<int64_t>(1, kMostWarps / plan.warps);
  const int64_t room = std::min<int64_t>(device.shared_a_block, device.shared_a_processor / blocks) - beside;
  plan.stages = int(std::min<int64_t>({room / row, kMostAhead, 4}));
  plan.bytes = size_t(plan.stages * row + states);
  if (plan.stages < 3) plan.warps = 0;
  return plan;
}

template <class T>
bool run_staying(NormForward a, int most, const Device& device, void* stream, int& error) {
  const int64_t vectors = a.n / kVector<T>;
  const StayingPlan plan = plan_staying(a.rows, vectors, most, device);
  if (plan.warps == 0) return false;
  const auto kernel = norm_forward_staying<T>;
  int count = 0;
  cudaError_t failed = cudaSuccess;
  if (plan.cluster > kMaxCluster) {
    failed = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (failed == cudaSuccess) {
    failed = resident_clusters(kernel, device, plan.warps * kWarp, plan.bytes, plan.cluster, count);
  }
  if (count == 0 && plan.cluster > kMaxCluster) {  // it grants no such clusters
    return cudaGetLastError(), run_staying<T>(a, kMaxCluster, device, stream, error);
  }
  error = int(failed);
  if (failed != cudaSuccess || count == 0) return failed != cudaSuccess;
  a.cluster = plan.cluster;
  const int64_t at_once = std::min<int64_t>(count, a.rows);
  const int64_t clusters = vectors > kStays ? at_once : std::max(divide_up(a.rows, kRowsEach), at_once);
  error = launch(kernel, StayingNorm{a, plan.part, plan.stages}, clusters * plan.cluster, dim3(plan.warps * kWarp),
                 plan.bytes, plan.cluster, stream, true);
  return true;
}

constexpr int64_t kLongRow = 32768;    // bytes, beyond which a block's registers do not hold a row
constexpr int64_t kLongOfFew = 16384;  // and from which few rows are better shared by blocks
constexpr int64_t kLongestNorm = 256;  // elements of rows in tiles: of longer ones a thread has too many

}  // namespace

bool norm_forward_copied(const NormForward& a, int dtype, const Device& device, void* stream, int& error) {
  if (!device.clusters || offset_in_vector(a.x) != offset_in_vector(a.y) || a.n > (int64_t(1) << 30)) return false;
  error = 0;
  bool taken = false;
  const int refused = with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    bool aligned = a.n % kVector<T> == 0;
    for (const void* tensor : {a.x, a.weight, a.bias}) aligned = aligned && offset_in_vector(tensor) == 0;
    const int64_t bytes = a.n * int64_t(sizeof(T));
    const bool is_long = bytes > kLongRow || (bytes >= kLongOfFew && a.rows * 4 <= device.processors);
    taken = aligned ? is_long && run_staying<T>(a, kMostBlocks, device, stream, error)
                    : a.n <= kLongestNorm && run_tiled<T>(a, device, stream, error);
    return 0;
  });
  return taken || refused;
}

}  // namespace fuseline
