// The backward of all norms for few rows: norms/norm_backward_apart.cuh and norms/norm_backward_few.cuh.
#include "norm_backward_few.cuh"

#include "norm_backward_apart.cuh"

#include "norm_sums.h"

namespace fuseline {
namespace {

constexpr int64_t kBlockElements = 6144;  // more are divided between blocks, of a cluster,
constexpr int64_t kLeastVectors = 4;      // as long as each has so many of a row
// Of one cluster: more have several, though these take a second kernel (128 x 16,384: 12.6 us; in one, 32 rows take 11.0).
constexpr int64_t kMostClusterRows = 48, kMostClusterElements = 1 << 18;
// What several launches do better: many short rows (512 x 768: 7 us, a cluster 22), and much of long ones.
constexpr int64_t kShortRow = 2048, kMostShortRows = 32, kMostElements = 1 << 22;

struct FewPlan {
  int threads = 0;  // of a block; 0: the chip does not hold these rows
  int cluster = 1, width = 0, across = 0;
  int rows = 0, clusters = 1;
  size_t bytes = 0;
};

template <class X, class Y>
FewPlan plan_few(int64_t rows, int64_t n, bool added, int most, int most_clusters, const Device& device) {
  FewPlan plan;
  const int64_t vectors = n / kVector<Y>;
  const auto width = [&] { return divide_up(vectors, plan.cluster); };
  while (plan.cluster < most && (width() > kFewThreads || (rows * n > plan.cluster * kBlockElements &&
                                                           width() >= 2 * kLeastVectors))) {
    plan.cluster *= 2;
  }
  if (width() > kFewThreads) return plan;
  plan.width = int(width());
  plan.across = plan.width <= kWarp ? power_of_two_from(plan.width) : int(divide_up(plan.width, kWarp)) * kWarp;
  const auto fits = [&](int clusters) {
    plan.clusters = clusters;
    plan.rows = int(divide_up(rows, clusters));
    const int beside = std::max(1, kWarp / plan.across);  // rows of a warp
    const int down = int(std::min<int64_t>(kFewThreads / plan.across, divide_up(plan.rows, beside) * beside));
    plan.threads = down * plan.across;
    plan.bytes = size_t(FewNormRoom<X, Y>(plan.rows, plan.threads, plan.across, plan.cluster, added).bytes);
    return plan.bytes + 1024 <= size_t(device.shared_a_block);
  };
  // One cluster if it holds them; else as many as there can be, since a second kernel is there anyway.
  if (rows <= kMostClusterRows && rows * n <= kMostClusterElements && fits(1)) return plan;
  const int64_t clusters = std::min<int64_t>(most_clusters, rows);
  if (clusters < 2 || !fits(int(clusters))) return FewPlan{};
  plan.clusters = int(divide_up(rows, plan.rows));
  return plan;
}

// Rows that a block of kApartThreads holds, by blocks of rows and of columns.
template <class X, class Y>
bool run_apart(const NormBackward& a, const Device& device, void* stream, int& error) {
  constexpr int kSize = kVector<Y>, kSomeSlots = 16 / kSize, kMostSlots = 2 * kSomeSlots, kLeastAbreast = 4;
  const int64_t vectors = a.n / kSize;
  if (vectors > kMostSlots * kApartThreads || !in_vectors<kSize>(a)) return false;
  // What x_bias's gradient is the sum of, as it is stored: not where the sum has more digits than that.
  const void* const dropped = a.grad_dropped ? a.grad_dropped : std::is_same_v<X, Y> && !a.dropout.seed ? a.grad_x : nullptr;
  if (a.grad_x_bias && (!dropped || (a.fp32_weights && sizeof(Y) < sizeof(float)))) return false;
  for (const void* const result : {a.grad_x, a.grad_dropped}) {  // what others still read is not written
    if (result && (result == a.x || result == a.grad_y)) return false;
  }
  const bool at_once = a.rows * vectors <= int64_t(device.processors) * 2 * kApartThreads;
  const int slots = vectors <= kApartThreads && at_once ? 1 : vectors <= kSomeSlots * kApartThreads ? kSomeSlots : kMostSlots;
  ApartNorm apart{a, 0, kWarp, 0};
  const int64_t threads = divide_up(vectors, slots);
  apart.across = threads <= kWarp ? power_of_two_from(threads) : int(divide_up(threads, kWarp)) * kWarp;
  // A thread has two rows of a column, or more where all blocks have as few columns as a read is worth.
  while (apart.abreast > kLeastAbreast && a.rows > 2 * kApartThreads / apart.abreast) apart.abreast /= 2;
  const int64_t column_blocks = divide_up(vectors, apart.abreast);
  if (a.grad_weight || a.grad_bias) apart.column_blocks = int(column_blocks);
  const int64_t row_blocks = a.wants_rows() ? divide_up(a.rows, kApartThreads / apart.across) : 0;
  const auto kernel = slots == 1            ? norm_backward_apart<X, Y, 1>
                      : slots == kSomeSlots ? norm_backward_apart<X, Y, kSomeSlots>
                                            : norm_backward_apart<X, Y, kMostSlots>;
  error = launch(kernel, apart, apart.column_blocks + row_blocks, dim3(kApartThreads), 0, 1, stream, device.clusters);
  if (error || !a.grad_x_bias) return true;
  // By a second launch, which has no rows, and in which they stand for what a norm's bias adds to.
  NormBackward& sums = apart.norm;
  sums.grad_y = dropped, sums.grad_bias = a.grad_x_bias;
  sums.grad_x = sums.grad_dropped = sums.grad_weight = sums.grad_x_bias = nullptr;
  apart.column_blocks = int(column_blocks);
  error = launch(kernel, apart, column_blocks, dim3(kApartThreads), 0, 1, stream, device.clusters);
  return true;
}

template <class X, class Y>
bool run_few(NormBackward a, const Device& device, void* stream, int& error) {
  if (!in_vectors<kVector<Y>>(a) || a.rows * a.n > kMostElements) return false;
  if (a.n <= kShortRow && a.rows > kMostShortRows) return false;
  const auto kernel = norm_backward_few<X, Y>;
  const int most = device.clusters ? kMostBlocks : 1;
  FewPlan plan = plan_few<X, Y>(a.rows, a.n, a.grad_sum, most, kMostFewClusters, device);
  if (plan.threads == 0) return false;
  int count = 0;
  if (plan.cluster > kMaxCluster) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  const cudaError_t found = resident_clusters(kernel, device, plan.threads, plan.bytes, plan.cluster, count);
  if (found != cudaSuccess || count == 0) return cudaGetLastError(), false;  // larger clusters than all devices have
  if (plan.clusters > count) {
    plan = plan_few<X, Y>(a.rows, a.n, a.grad_sum, most, count, device);
    if (plan.threads == 0) return false;
    const cudaError_t again = resident_clusters(kernel, device, plan.threads, plan.bytes, plan.cluster, count);
    if (again != cudaSuccess || count < plan.clusters) return cudaGetLastError(), false;
  }
  a.cluster = plan.cluster;
  error = launch(kernel, FewNorm{a, plan.width, plan.across, plan.rows, plan.clusters},
                 int64_t(plan.clusters) * plan.cluster, dim3(unsigned(plan.threads)), plan.bytes, plan.cluster, stream,
                 device.clusters);
  if (!error && a.partials && plan.clusters > 1) {
    const int sums = a.grad_x_bias ? 3 : a.grad_bias ? 2 : 1;
    error = add_partials<Y>(a, sums, plan.clusters, device.clusters, stream);
  }
  return true;
}

}  // namespace

bool norm_backward_few(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error) {
  if (a.rows > kMostFewRows || row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given) return false;
  return 0 != with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    using X = decltype(x);
    using Y = decltype(y);
    return int(run_apart<X, Y>(a, device, stream, error) || run_few<X, Y>(a, device, stream, error));
  });
}

}  // namespace fuseline
