// grad_x = scale * y * (grad_out - sum(grad_out * y) / sum(y)) over each row.
//
// The sum of y is 1 but for the rounding of y to 16 bits, which matters where one key takes nearly all: with y = 1 and
// 6e-6, and without the division, its gradient would be off by 6e-6 * grad_out, as much as the gradient itself. The y
// of fp32 rows is not divided, but the products are summed in double.
//
// Moves: grad_out and y read once, grad_x written once. Does: 5 operations an element. Limit: HBM bandwidth.
//
// Threads: as in softmax_forward.cu, but both rows stay in registers as they came from memory (two arrays of fp32
// would not leave room for enough threads) and are widened twice. Few rows have kernels of their own
// (softmax_backward_few.cuh). Long rows wait in shared memory until they have met (waiting.cuh), and short ones at
// odd addresses pass through it (tiled.cuh). What fits neither is read twice.

#include "device/launch.cuh"
#include "device/overlap.cuh"
#include "softmax_backward_few.cuh"
#include "device/tiled.cuh"

namespace fuseline {
namespace {

struct SoftmaxBackward {
  const void* grad_out;
  const void* y;
  void* grad_x;
  int64_t rows, n;
  float scale;
  bool y_vectors;       // y stands in its 16-byte vectors as grad_out does
  bool grad_x_vectors;  // and so does grad_x
  int cluster;
  int part;             // slots of a warp's part of a row that waits, or rows of a tile
  int together;         // rows that wait in a block
  int line;             // bytes, at which the parts of rows that wait begin
};

constexpr int kMostHeld = softmax_plans::kMostHeldBackward;

// ---- kernels ----

template <class T, int kHeld, bool kAligned, bool kOneWarp>
__global__ void __launch_bounds__(most_threads(kOneWarp), least_blocks(kOneWarp, 8 * kHeld))
    softmax_backward_rows(const SoftmaxBackward a) {
  __shared__ Sums<T> shared[2 * kMaxStates];
  Group<Sums<T>, kOneWarp> group(shared, a.cluster);
  let_next_start();
  wait_for_earlier();
  constexpr int kSize = kVector<T>;
  const int n = int(a.n);
  const int step = group.threads * kSize;
  const int64_t row = int64_t(group.first) * blockDim.y + threadIdx.y;
  const int inside = row < a.rows ? n : 0;
  const T* grad_out = static_cast<const T*>(a.grad_out) + row * a.n;
  const T* y = static_cast<const T*>(a.y) + row * a.n;
  T* grad_x = static_cast<T*>(a.grad_x) + row * a.n;
  const int head = kAligned ? 0 : elements_into_vector(grad_out);
  int start = (group.rank * kHeld * group.threads + group.lane) * kSize - head;
  uint4 grad_raw[kHeld], y_raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if constexpr (kAligned) {
      const bool in = start + k * step < inside;
      grad_raw[k] = in ? load_lines_now(grad_out + start + k * step) : make_uint4(0, 0, 0, 0);
      y_raw[k] = in ? load_lines_now(y + start + k * step) : make_uint4(0, 0, 0, 0);
    } else {
      grad_raw[k] = load_vector<T, kAligned>(grad_out, start + k * step, inside, true);
      y_raw[k] = load_vector<T, kAligned>(y, start + k * step, inside, a.y_vectors);
    }
  }
  Sums<T> sums{};
#pragma unroll
  for (int k = 0; k < kHeld; ++k) sums = plus(sums, sums_of<T>(grad_raw[k], y_raw[k]));
  const float mean = mean_of(sum_over_row(sums, group));
  forget(start);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) forget(grad_raw[k]), forget(y_raw[k]);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    float result[kSize];
    gradient<T>(grad_raw[k], y_raw[k], mean, a.scale, result);
    store_vector<T, kAligned>(grad_x, start + k * step, inside, a.grad_x_vectors, result);
  }
}

// Short rows that do not keep to 16-byte steps.
template <class T>
__global__ void __launch_bounds__(kTileBlock, 6) softmax_backward_tiled(const SoftmaxBackward a) {
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ uint64_t arrived;
  Group<Sums<T>, true> group(nullptr, 1);
  const int n = int(a.n);
  const int64_t first = int64_t(blockIdx.x) * a.part;
  const int rows = int(min(a.rows - first, int64_t(a.part)));
  const Tile<T> grad_tile(ring, rows, n);
  const Tile<T> y_tile(ring + (a.part * n + kVector<T> - 1) / kVector<T>, rows, n);
  if (threadIdx.x + threadIdx.y == 0) barrier_init(&arrived, 2), publish_barriers();
  __syncwarp();
  let_next_start();
  wait_for_earlier();
  grad_tile.fetch(static_cast<const T*>(a.grad_out) + first * n, &arrived);
  y_tile.fetch(static_cast<const T*>(a.y) + first * n, &arrived);
  __syncthreads();
  barrier_wait(&arrived, 0);
#pragma unroll 1
  for (int at = threadIdx.y; at < a.part; at += blockDim.y) {
    T* const grad_out = grad_tile.shared + at * n;
    const T* const y = y_tile.shared + at * n;
    const int inside = at < rows ? n : 0;
    Sums<T> sums{};
#pragma unroll 4
    for (int i = group.lane; i < inside; i += group.threads) {
      add_to<T>(sums, to_float(grad_out[i]), to_float(y[i]));
    }
    const float mean = mean_of(group.warp_sum(sums));
#pragma unroll 4
    for (int i = group.lane; i < inside; i += group.threads) {
      const float share = to_float(y[i]);
      grad_out[i] = from_float<T>(share == 0.f ? 0.f : a.scale * share * (to_float(grad_out[i]) - mean));
    }
  }
  show_to_copies();
  __syncthreads();
  grad_tile.send(static_cast<T*>(a.grad_x) + first * n);
}

// Rows of a warp that keep to 16-byte steps, but not to lines of the cache.
template <class T>
__global__ void __launch_bounds__(kTileBlock, 4) softmax_backward_tiled_vectors(const SoftmaxBackward a) {
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ uint64_t arrived;
  const int n = int(a.n), vectors = n / kVector<T>, lane = int(threadIdx.x);
  const int64_t first = int64_t(blockIdx.x) * a.part;
  const int rows = int(min(a.rows - first, int64_t(a.part)));
  const Tile<T> grad_tile(ring, rows, n), y_tile(ring + a.part * vectors, rows, n);
  if (threadIdx.x + threadIdx.y == 0) barrier_init(&arrived, 2), publish_barriers();
  __syncwarp();
  let_next_start();
  wait_for_earlier();
  grad_tile.fetch(static_cast<const T*>(a.grad_out) + first * n, &arrived);
  y_tile.fetch(static_cast<const T*>(a.y) + first * n, &arrived);
  __syncthreads();
  barrier_wait(&arrived, 0);
#pragma unroll 1
  for (int at = threadIdx.y; at < rows; at += blockDim.y) {
    uint4* const grad_out = ring + at * vectors;
    const uint4* const y = ring + (a.part + at) * vectors;
    uint4 grad_raw[kMostHeld], y_raw[kMostHeld];
    Sums<T> sums{};
#pragma unroll
    for (int k = 0; k < kMostHeld; ++k) {
      const int slot = lane + k * kWarp;
      grad_raw[k] = y_raw[k] = make_uint4(0, 0, 0, 0);
      if (slot < vectors) grad_raw[k] = grad_out[slot], y_raw[k] = y[slot];
      sums = plus(sums, sums_of<T>(grad_raw[k], y_raw[k]));
    }
    const float mean = mean_of(sum_of_lanes(sums, kWarp));
#pragma unroll
    for (int k = 0; k < kMostHeld; ++k) forget(grad_raw[k]), forget(y_raw[k]);
#pragma unroll
    for (int k = 0; k < kMostHeld; ++k) {
      const int slot = lane + k * kWarp;
      float result[kVector<T>];
      gradient<T>(grad_raw[k], y_raw[k], mean, a.scale, result);
      if (slot < vectors) grad_out[slot] = pack<T>(result);
    }
  }
  show_to_copies();
  __syncthreads();
  grad_tile.send(static_cast<T*>(a.grad_x) + first * n);
}

// Long rows; all three tensors stand in their 16-byte vectors alike. kTogether as in softmax_forward.cu.
template <class T, bool kTogether>
__global__ void __launch_bounds__(kMostThreads, 2) softmax_backward_waiting(const SoftmaxBackward a) {
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ __align__(16) WaitingRoom<Sums<T>> room;
  Seat<Sums<T>> seat(room, a.cluster, 2, kTogether ? a.together : 1);
  if (kTogether && seat.row >= a.rows) return;
  let_next_start();
  wait_for_earlier();
  const Part<T> grad_part(a.grad_out, seat.row, a.rows, a.n, seat.place(), a.part, a.line);
  const Part<T> y_part(a.y, seat.row, a.rows, a.n, seat.place(), a.part, a.line);
  uint4* const slots = ring + seat.warp * 2 * a.part;
  uint4* const y_slots = slots + a.part;
  if (seat.lane == 0) {
    grad_part.fetch(slots, room.arrived[seat.warp]);
    y_part.fetch(y_slots, room.arrived[seat.warp]);
  }
  Sums<T> mine{};
#pragma unroll 1
  for (int piece = 0; piece < grad_part.pieces(); ++piece) {
    barrier_wait(&room.arrived[seat.warp][piece], 0);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const int slot = piece * kPieceSlots + k * kWarp + seat.lane;
      if (kTogether && k > 0 && slot - seat.lane >= grad_part.count) break;
      mine = plus(mine, sums_of<T>(grad_part.take(slots, slot, 0), grad_part.take(y_slots, slot, 0)));
    }
  }
  const Sums<T>* const states = seat.meet(sum_over_warp(mine));
  Sums<T> whole{};
#pragma unroll 1
  for (int i = seat.lane; i < seat.count(); i += kWarp) whole = plus(whole, states[i]);
  const float mean = mean_of(sum_over_warp(whole));
  T* const grad_x = static_cast<T*>(a.grad_x) + seat.row * a.n;
#pragma unroll 1
  for (int piece = 0; piece < grad_part.pieces(); ++piece) {
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const int slot = piece * kPieceSlots + k * kWarp + seat.lane;
      if (kTogether && k > 0 && slot - seat.lane >= grad_part.count) break;
      float result[kVector<T>];
      gradient<T>(grad_part.take(slots, slot, 0), grad_part.take(y_slots, slot, 0), mean, a.scale, result);
      grad_part.put(grad_x, slots, slot, result);
    }
    grad_part.send(grad_x, slots, piece);
  }
  if (seat.lane == 0) wait_for_copies_out();
}

template <class T>
__global__ void __launch_bounds__(512) softmax_backward_streamed(const SoftmaxBackward a) {
  __shared__ Sums<T> shared[2 * kMaxStates];
  Group<Sums<T>> group(shared, a.cluster);
  let_next_start();
  wait_for_earlier();
  constexpr int kSize = kVector<T>;
  const int64_t step = int64_t(group.threads) * kSize;
  const int64_t row = group.first;
  const T* grad_out = static_cast<const T*>(a.grad_out) + row * a.n;
  const T* y = static_cast<const T*>(a.y) + row * a.n;
  T* grad_x = static_cast<T*>(a.grad_x) + row * a.n;
  const int head = elements_into_vector(grad_out);
  const int64_t vectors = (a.n + head + kSize - 1) / kSize;
  const int64_t share = (vectors + group.blocks - 1) / group.blocks;
  const int64_t begin = (share * group.rank + group.lane) * kSize - head;
  const int64_t share_end = share * (group.rank + 1) * kSize - head;
  const int64_t end = share_end < a.n ? share_end : a.n;
  Sums<T> sums{};
  for (int64_t from = begin; from < end; from += kPiece * step) {
    uint4 grad_raw[kPiece], y_raw[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      grad_raw[k] = load_vector<T, false>(grad_out, from + k * step, end, true);
      y_raw[k] = load_vector<T, false>(y, from + k * step, end, a.y_vectors);
    }
#pragma unroll
    for (int k = 0; k < kPiece; ++k) sums = plus(sums, sums_of<T>(grad_raw[k], y_raw[k]));
  }
  const float mean = mean_of(sum_over_row(sums, group));
  for (int64_t from = begin; from < end; from += step) {
    float result[kSize];
    gradient<T>(load_vector<T, false>(grad_out, from, end, true),
                load_vector<T, false>(y, from, end, a.y_vectors), mean, a.scale, result);
    store_vector<T, false>(grad_x, from, end, a.grad_x_vectors, result);
  }
}

// ---- launcher ----

// As in softmax_forward.cu, but that few rows' kernel takes all blocks of one vector a thread, whatever the dtype.
template <class T>
auto row_kernel(const SoftmaxPlan& plan, bool aligned) -> void (*)(SoftmaxBackward) {
  constexpr int kMost = kMostHeld;
  if constexpr (std::is_same_v<T, __half>) {  // which no model has: one number of vectors
    if (!aligned) return softmax_backward_rows<T, kMost, false, false>;
    return plan.one_warp ? softmax_backward_rows<T, kMost, true, true> : softmax_backward_rows<T, kMost, true, false>;
  } else {
    if (!aligned && plan.held == 1) return softmax_backward_rows<T, 1, false, true>;
    if (!aligned) return softmax_backward_rows<T, kMost, false, false>;
    if (!plan.one_warp && plan.held > 2) return softmax_backward_rows<T, kMost, true, false>;
    if (!plan.one_warp) return softmax_backward_rows<T, 2, true, false>;
    if (plan.held > 2) return softmax_backward_rows<T, kMost, true, true>;
    if (plan.held == 2) return softmax_backward_rows<T, 2, true, true>;
    return softmax_backward_rows<T, 1, true, true>;
  }
}

// `fits` is false where the device does not hold the plan's blocks; then nothing ran.
template <class T>
int run_as(const SoftmaxPlan& plan, SoftmaxBackward a, bool aligned, const Device& device, void* stream, bool& fits) {
  static_assert(sizeof(WaitingRoom<Sums<T>>) == softmax_plans::backward_room());
  const LaunchShape& shape = plan.shape;
  a.part = plan.part, a.together = plan.together, a.line = plan.line, a.cluster = shape.cluster;
  switch (plan.kernel) {
    case SoftmaxKernel::few:
      if constexpr (kSpecial<T>) {
        const FewBackward few{static_cast<const uint4*>(a.grad_out), static_cast<const uint4*>(a.y),
                              static_cast<uint4*>(a.grad_x), a.rows, int(a.n / kVector<T>), shape.cluster, a.scale};
        return launch(few_backward_kernel<T>(plan), few, shape, device, stream);
      }
      return FUSELINE_UNSUPPORTED;
    case SoftmaxKernel::tiled:
      if constexpr (kSpecial<T>) return launch_tiles(softmax_backward_tiled<T>, a, shape, device, stream);
      return FUSELINE_UNSUPPORTED;
    case SoftmaxKernel::tiled_vectors:
      if constexpr (kSpecial<T>) return launch_tiles(softmax_backward_tiled_vectors<T>, a, shape, device, stream);
      return FUSELINE_UNSUPPORTED;
    case SoftmaxKernel::waiting:
      return launch_waiting(softmax_backward_waiting<T, false>, a, shape, device, stream, fits);
    case SoftmaxKernel::waiting_together:
      if constexpr (kSpecial<T>) return launch_waiting(softmax_backward_waiting<T, true>, a, shape, device, stream, fits);
      return FUSELINE_UNSUPPORTED;
    case SoftmaxKernel::rows:
      return launch(row_kernel<T>(plan, aligned), a, shape, device, stream);
    case SoftmaxKernel::streamed:
      return launch(softmax_backward_streamed<T>, a, shape, device, stream);
    default:
      return FUSELINE_UNSUPPORTED;
  }
}

template <class T>
int run(SoftmaxBackward a, const Device& device, void* stream) {
  const int offset = offset_in_vector(a.grad_out);
  a.y_vectors = offset_in_vector(a.y) == offset;
  a.grad_x_vectors = offset_in_vector(a.grad_x) == offset;
  const bool aligned = a.n % kVector<T> == 0 && offset == 0 && a.y_vectors && a.grad_x_vectors;
  const SoftmaxBackwardProblem problem{int(sizeof(T)), a.rows, a.n, offset_in_line(a.grad_out), offset_in_line(a.y),
                                       offset_in_line(a.grad_x), std::is_same_v<T, __half>};
  for (Refused refused = Refused::nothing;;) {
    const SoftmaxPlan plan = plan_softmax_backward(problem, device, refused);
    bool fits = true;
    const int error = run_as<T>(plan, a, aligned, device, stream, fits);
    if (fits || error) return error;
    refused = plan.refusable;
  }
}

}  // namespace
}  // namespace fuseline

int fuseline_softmax_backward(const void* grad_out, const void* y, void* grad_x, int64_t rows, int64_t n,
                              double scale, int dtype, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype)) return FUSELINE_UNSUPPORTED;
  if (rows == 0 || n == 0) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  SoftmaxBackward a{};
  a.grad_out = grad_out, a.y = y, a.grad_x = grad_x;
  a.rows = rows, a.n = n, a.scale = float(scale);
  return with_dtype(dtype, [&](auto type) { return run<decltype(type)>(a, device, stream); });
}
