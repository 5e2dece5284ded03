// The gradients of the tables of y = dropout(table[token] + position_table[position]).
//
// Moves: grad_out read once for each table, in the order of the rows it goes to, and the gradient written once, zeros where
// no id names a row. Limit: HBM bandwidth, for few tokens the launches.
//
// Threads: few ids are looked through by every block, which adds up some neighbouring rows: one launch
// (embedding_sums.cuh). Many are first sorted into bins of such rows (embedding_bins.cuh). No atomics on floats: the same
// bits each run, however often an id comes. Without ids the positions repeat, and a thread adds up the rows of one
// position.

#include "embedding.cuh"
#include "embedding_bins.cuh"
#include "embedding_sums.cuh"

namespace fuseline {
namespace {

constexpr int kAhead = 4;  // rows of a position loaded before the first is added

struct PositionGradient {
  const void* grad_out;
  void* result;
  int64_t items, period, n;
  Dropout dropout;
  Divisor columns;
};

template <class T, int kWide>
__global__ void __launch_bounds__(kElementwiseBlock) embedding_position_sums(const PositionGradient a) {
  const uint32_t thread = blockIdx.x * uint32_t(kElementwiseBlock) + threadIdx.x;
  const uint32_t position = a.columns.divide(thread);
  if (position >= a.period) return;
  const int64_t first = int64_t(thread - position * a.columns.value) * kWide;
  const uint64_t seed = seed_of(a.dropout);
  float sums[kWide] = {};
  for (int64_t item = position; item < a.items; item += kAhead * a.period) {
    Raw<T, kWide> raw[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t at = item + u * a.period;
      if (at < a.items) raw[u] = load_wide<T, kWide>(static_cast<const T*>(a.grad_out) + at * a.n + first);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t at = item + u * a.period;
      if (at >= a.items) continue;
      float grad[kWide], multiplier[kWide];
      widen<T, kWide>(raw[u], grad);
      multipliers(a.dropout, seed, at * a.n + first, multiplier);
#pragma unroll
      for (int i = 0; i < kWide; ++i) sums[i] = fmaf(grad[i], multiplier[i], sums[i]);
    }
  }
  store_wide<T, kWide>(static_cast<T*>(a.result) + int64_t(position) * a.n + first, sums);
}

// ---- launchers ----

int zero(void* at, int64_t elements, int dtype, void* stream) {
  const size_t bytes = size_t(elements) * (dtype == FUSELINE_FLOAT32 ? 4 : 2);
  return int(cudaMemsetAsync(at, 0, bytes, static_cast<cudaStream_t>(stream)));
}

unsigned blocks_for(int64_t threads) { return unsigned(divide_up(threads, kElementwiseBlock)); }

// As `plan` has it, for table.rows rows from `first_row` on.
template <class T, int kWide>
int run_sums(RowSums a, const EmbeddingBackwardPlan& plan, int64_t first_row, void* workspace, const Device& device, void* stream) {
  SummedTable& table = a.table;
  char* const space = static_cast<char*>(workspace);
  int resident = 0;
  if (plan.binned) {
    cudaError_t error = cudaMemsetAsync(space, 0, plan.at.partials, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return int(error);
    Bins b{};
    b.ids = table.ids, b.period = table.period, b.skipped = table.skipped, b.first_row = first_row;
    b.entries = reinterpret_cast<uint32_t*>(space + plan.at.entries);
    b.starts = reinterpret_cast<uint16_t*>(space + plan.at.starts), b.totals = reinterpret_cast<uint32_t*>(space);
    b.items = a.items, b.rows = table.rows, b.tile = uint32_t(plan.bins.tile), b.tiles = uint32_t(plan.bins.tiles);
    b.bins = uint32_t(plan.bins.bins), b.bin_rows = Divisor(uint32_t(plan.bins.bin_rows));
    error = resident_clusters(embedding_bin_ids, device, kBinBlock, plan.bin_shape.shared, 1, resident);
    if (error != cudaSuccess) return int(error);
    const int code = launch(embedding_bin_ids, b, plan.bins.tiles, dim3(kBinBlock), plan.bin_shape.shared, 1, stream);
    if (code) return code;
    a.entries = b.entries, a.starts = b.starts, a.totals = b.totals, a.tile = b.tile, a.tiles = b.tiles;
    a.arrived = reinterpret_cast<uint32_t*>(space + plan.at.arrived);
    a.partials = reinterpret_cast<float*>(space + plan.at.partials), a.further = uint32_t(plan.bins.further);
  }
  table.result = static_cast<T*>(table.result) + first_row * a.n;
  table.bins = uint32_t(plan.bins.bins), table.bin_rows = uint32_t(plan.bins.bin_rows);
  a.capacity = uint32_t(plan.capacity), a.slice = Divisor(uint32_t(plan.slice)), a.slices = Divisor(uint32_t(plan.slices));
  const auto kernel = plan.binned ? embedding_row_sums<T, kWide, true> : embedding_row_sums<T, kWide, false>;
  const cudaError_t error = resident_clusters(kernel, device, kSumBlock, plan.shape.shared, 1, resident);
  if (error != cudaSuccess) return int(error);
  return launch(kernel, a, plan.shape, device, stream);
}

}  // namespace
}  // namespace fuseline

size_t fuseline_embedding_backward_workspace(int64_t items, int64_t n) { return fuseline::embedding_workspace(items, n); }

int fuseline_embedding_backward(const void* grad_out, const int64_t* ids, int64_t period, int64_t skipped,
                                void* grad_table, int adds, void* workspace, int64_t items, int64_t n, int64_t rows,
                                const int64_t* seed, double p, int dtype, void* stream) {
  using namespace fuseline;
  if (items < 0 || n < 0 || rows < 0 || period < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype)) return FUSELINE_UNSUPPORTED;
  if (too_many(items, n) || rows >= 0xffffffffll) return int(cudaErrorInvalidConfiguration);
  if (n == 0 || rows == 0) return 0;
  if (items == 0 || period == 0) return adds ? 0 : zero(grad_table, rows * n, dtype, stream);
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  RowSums a{};
  a.grad_out = grad_out, a.items = uint32_t(items), a.n = n, a.dropout = dropout_of(seed, p);
  a.table = {ids, period, skipped, grad_table, uint32_t(rows), 0, 0, adds != 0};
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_width<T>(n, {grad_out, grad_table}, [&](auto wide) {
      constexpr int kWide = decltype(wide)::value;
      const EmbeddingProblem problem{int(sizeof(T)), items, n, rows, kWide, false};
      EmbeddingBackwardPlan plan = plan_embedding_backward(problem, device);
      int code = 0;
      for (int64_t first = 0, part = plan.part; first < rows && code == 0; first += part) {
        a.table.rows = uint32_t(std::min(part, rows - first));
        if (a.table.rows != plan.part) plan = embedding_plans::plan_binned_sums({int(sizeof(T)), items, n, a.table.rows, kWide, false}, device);
        code = run_sums<T, kWide>(a, plan, first, workspace, device, stream);
      }
      return code;
    });
  });
}

int fuseline_embedding_position_backward(const void* grad_out, void* grad_table, int64_t items, int64_t n, int64_t rows,
                                         int64_t period, const int64_t* seed, double p, int dtype, void* stream) {
  using namespace fuseline;
  if (items < 0 || n < 0 || rows < 0 || period < 0 || period > rows) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype)) return FUSELINE_UNSUPPORTED;
  if (too_many(items, n)) return int(cudaErrorInvalidConfiguration);
  if (n == 0 || rows == 0) return 0;
  if (items == 0 || period == 0) return zero(grad_table, rows * n, dtype, stream);
  const int64_t bytes = period * n * (dtype == FUSELINE_FLOAT32 ? 4 : 2);
  if (rows > period) {
    const int code = zero(static_cast<char*>(grad_table) + bytes, (rows - period) * n, dtype, stream);
    if (code) return code;
  }
  PositionGradient a{};
  a.grad_out = grad_out, a.result = grad_table, a.items = items, a.period = period, a.n = n;
  a.dropout = dropout_of(seed, p);
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_width<T>(n, {grad_out, grad_table}, [&](auto wide) {
      constexpr int kWide = decltype(wide)::value;
      a.columns = Divisor(uint32_t(n / kWide));
      return launch(embedding_position_sums<T, kWide>, a, blocks_for(period * a.columns.value),
                    dim3(kElementwiseBlock), 0, 1, stream);
    });
  });
}
