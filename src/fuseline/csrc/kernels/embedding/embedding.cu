// y = dropout(table[token] + position_table[position]).
//
// Moves: a row of each table read (of the positions from L2) and a row written for each token. Limit: HBM bandwidth, for
// few tokens the launch.
//
// Threads: as in elementwise.cuh, a row being a token; of a table larger than the L2 keeps, a slice of the columns is
// gathered for all tokens before the next.

#include "embedding.cuh"

namespace fuseline {
namespace {

using embedding_plans::kFewRows, embedding_plans::kManyRows;

struct EmbeddingForward {
  const int64_t* tokens;
  const void* table;
  const int64_t* positions;    // of item i at i % period; null if i % period is its position
  const void* position_table;  // null for none
  void* y;
  int64_t rows, position_rows, n;
  Divisor period;
  Dropout dropout;
  Divisor slice;  // accesses of a row that a block reaches; the grid's y goes over the slices
  int64_t items, row_factor, row_step;  // a thread's items are row_step apart
  bool streams;                // y is more than the L2 keeps for its reader: leave the room to the table
};

// The 16 bytes (or one element) of a table's row from column `first`; NaN if there is no such row.
template <class T, int kWide>
__device__ __forceinline__ Raw<T, kWide> gather(const void* table, int64_t row, int64_t rows, int64_t n, int64_t first) {
  if (row < 0 || row >= rows) {
    if constexpr (kWide > 1) {
      return make_uint4(0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu);
    } else {
      return from_float<T>(__int_as_float(0x7fffffff));
    }
  }
  const T* at = static_cast<const T*>(table) + row * n + first;
  if constexpr (kWide > 1) {
    return __ldg(reinterpret_cast<const uint4*>(at));
  } else {
    return *at;
  }
}

// Blocks of a multiprocessor; before sm_90 code for that many spills a mask's words.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocksOfMany = 5, kBlocksOfFew = 6;
#else
constexpr int kBlocksOfMany = 6, kBlocksOfFew = 8;
#endif

// As EmbeddingProblem::has_one_kernel says.
template <class T, int kWide>
constexpr bool kOneKernel = kWide == 1 || std::is_same_v<T, __half>;

// kPositions: there is a table of them, or may be.
template <class T, int kWide, bool kPositions, int kRows>
__global__ void __launch_bounds__(kElementwiseBlock, kPositions ? 4 : kRows == kManyRows ? kBlocksOfMany : kBlocksOfFew)
    embedding_forward(const EmbeddingForward a) {
  let_next_start();
  wait_for_earlier();
  const uint32_t thread = blockIdx.x * uint32_t(kElementwiseBlock) + threadIdx.x;
  const uint32_t group = a.slice.divide(thread);
  const int64_t first = (int64_t(blockIdx.y) * a.slice.value + thread - group * a.slice.value) * kWide;
  if (first >= a.n) return;
  const int64_t item = int64_t(group) * a.row_factor;
  const bool positioned = kPositions && (!kOneKernel<T, kWide> || a.position_table);
  const uint64_t seed = seed_of(a.dropout);
  int64_t tokens[kRows], positions[kRows];
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const int64_t at = item + u * a.row_step;
    if (at >= a.items) continue;
    tokens[u] = __ldg(a.tokens + at);
    if (positioned) {
      const uint32_t within = uint32_t(at) - a.period.divide(uint32_t(at)) * a.period.value;
      positions[u] = a.positions ? __ldg(a.positions + within) : within;
    }
  }
  Raw<T, kWide> raw[kRows], raw_position[kRows];
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (item + u * a.row_step >= a.items) continue;
    raw[u] = gather<T, kWide>(a.table, tokens[u], a.rows, a.n, first);
    if (positioned) {
      raw_position[u] = gather<T, kWide>(a.position_table, positions[u], a.position_rows, a.n, first);
    }
  }
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const int64_t at = item + u * a.row_step;
    if (at >= a.items) continue;
    float sum[kWide], multiplier[kWide];
    widen<T, kWide>(raw[u], sum);
    if (positioned) {
      float position[kWide];
      widen<T, kWide>(raw_position[u], position);
#pragma unroll
      for (int i = 0; i < kWide; ++i) sum[i] += position[i];
    }
    multipliers(a.dropout, seed, at * a.n + first, multiplier);
#pragma unroll
    for (int i = 0; i < kWide; ++i) sum[i] *= multiplier[i];
    T* const to = static_cast<T*>(a.y) + at * a.n + first;
    if constexpr (kWide > 1) {
      if (a.streams) {
        __stcs(reinterpret_cast<uint4*>(to), pack<T>(sum));
        continue;
      }
    }
    store_wide<T, kWide>(to, sum);
  }
}

// ---- launcher ----

template <class T, int kWide>
auto kernel_of(const EmbeddingForwardPlan& plan) -> void (*)(EmbeddingForward) {
  if constexpr (!kOneKernel<T, kWide>) {
    if (!plan.positions) {
      return plan.rows_of_thread == kFewRows ? embedding_forward<T, kWide, false, kFewRows> : embedding_forward<T, kWide, false, kManyRows>;
    }
    if (plan.rows_of_thread == kFewRows) return embedding_forward<T, kWide, true, kFewRows>;
  }
  return embedding_forward<T, kWide, true, kManyRows>;
}

}  // namespace
}  // namespace fuseline

int fuseline_embedding_forward(const int64_t* tokens, const void* table, const int64_t* positions,
                               const void* position_table, void* y, int64_t items, int64_t n, int64_t rows,
                               int64_t period, int64_t position_rows, const int64_t* seed, double p, int dtype,
                               void* stream) {
  using namespace fuseline;
  if (items < 0 || n < 0 || rows < 0 || period < 0 || position_rows < 0) return FUSELINE_BAD_SIZE;
  if (too_many(items, n)) return int(cudaErrorInvalidConfiguration);
  if (items == 0 || n == 0) return known_dtype(dtype) ? 0 : FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  EmbeddingForward a{};
  a.tokens = tokens, a.table = table, a.positions = positions, a.position_table = position_table, a.y = y;
  a.rows = rows, a.position_rows = position_rows, a.n = n;
  a.items = items;
  a.period = Divisor(uint32_t(std::max<int64_t>(1, std::min(period, items))));
  a.dropout = dropout_of(seed, p);
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_width<T>(n, {table, position_table, y}, [&](auto wide) {
      constexpr int kWide = decltype(wide)::value;
      const EmbeddingProblem problem{int(sizeof(T)), items, n, rows, kWide, position_table != nullptr,
                                     std::is_same_v<T, __half>};
      const EmbeddingForwardPlan plan = plan_embedding_forward(problem, device);
      a.row_factor = plan.walk.row_factor, a.row_step = plan.walk.row_step, a.streams = plan.streams;
      a.slice = Divisor(uint32_t(plan.slice));
      const dim3 grid(unsigned(plan.shape.grid), unsigned(plan.slices));
      if (device.clusters) return launch_overlapping(kernel_of<T, kWide>(plan), a, grid, kElementwiseBlock, 0, 1, stream);
      kernel_of<T, kWide>(plan)<<<grid, kElementwiseBlock, 0, static_cast<cudaStream_t>(stream)>>>(a);
      return int(cudaGetLastError());
    });
  });
}
