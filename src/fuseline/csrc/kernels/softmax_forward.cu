// y = softmax(scale * x + mask) over the last dimension, with the maximum taken out first.
//
// Moves: x read once, y written once (of a causal row only the visible part is read); a mask that is broadcast is
// read from cache. Does: about 6 operations and one exponential an element. Limit: HBM bandwidth.
//
// Threads: a row belongs to a group (group.cuh) of 1 to 32 threads, of a block, or of a cluster, and stays in
// registers as fp32: kHeld 16-byte vectors a thread, those of neighbouring threads side by side. Each warp takes its
// own maximum and its sum of exponentials against that; the warps then meet once, and each scales its exponentials
// to the maximum of the row. Few rows of 16 bits have kernels of their own (softmax_forward_few.cuh), many of them stay as
// they came (softmax_packed.cuh), long ones wait in shared memory until they have met (waiting.cuh), and short ones at odd
// addresses pass through it (tiled.cuh). What fits neither is read twice (the second time from L2 if it has it).

#include "device/overlap.cuh"
#include "device/powers.cuh"
#include "device/softmax.cuh"
#include "device/softmax_forward_few.cuh"
#include "device/softmax_forward_tiled.cuh"
#include "device/softmax_packed.cuh"

namespace fuseline {
namespace {

// The scaled and masked scores first .. first + kVector of a row from their 16 bytes; -inf where not visible.
template <class T, bool kPlain, class Index>
__device__ __forceinline__ void score_vector(const SoftmaxForward& a, const Row& at, const uint4& raw, Index first,
                                             Index visible, float (&score)[kVector<T>]) {
  unpack<T>(raw, score);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) score[i] *= a.scale;
  const bool whole = first >= 0 && first + kVector<T> <= visible;
  if (!kPlain && whole && a.mask_vectors) {
    mask_vector<T>(a, at.mask_at + first, score);
  } else if (!whole || (!kPlain && a.mask_kind != FUSELINE_MASK_NONE)) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      const Index j = first + i;
      if (j < 0 || j >= visible) {
        score[i] = -kInfinity;
      } else if (!kPlain && a.mask_kind != FUSELINE_MASK_NONE) {
        score[i] = mask_one<T>(a, at.mask_at + j * a.mask_strides[3], score[i]);
      }
    }
  }
}

// 32 values a thread (held = 32 / kVector) leave room for 1024 threads a multiprocessor.
template <class T>
constexpr int kMostHeld = 32 / kVector<T>;

// ---- kernels ----

// kPlain: rows keep to 16-byte steps and there is no mask.
template <class T, int kHeld, bool kPlain, bool kOneWarp>
__global__ void __launch_bounds__(most_threads(kOneWarp), least_blocks(kOneWarp, kHeld * kVector<T>))
    softmax_forward_rows(const SoftmaxForward a) {
  __shared__ MaxSum<T> shared[2 * kMaxStates];
  Group<MaxSum<T>, kOneWarp> group(shared, a.cluster);
  let_next_start();
  wait_for_earlier();
  constexpr int kSize = kVector<T>;
  const int n = int(a.n);
  const int step = group.threads * kSize;
  int64_t row = int64_t(group.first) * blockDim.y + threadIdx.y;
  const Row at = locate_row(a, row);
  const int visible = int(at.visible);
  const T* x = static_cast<const T*>(a.x) + row * a.n;
  const int head = kPlain ? 0 : elements_into_vector(x);
  int start = (group.rank * kHeld * group.threads + group.lane) * kSize - head;
  uint4 raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if constexpr (kPlain) {
      raw[k] = start + k * step < visible ? load_lines_now(x + start + k * step) : make_uint4(0, 0, 0, 0);
    } else {
      raw[k] = load_vector<T, kPlain>(x, start + k * step, visible, true);
    }
  }
  float score[kHeld][kSize];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) score_vector<T, kPlain>(a, at, raw[k], start + k * step, visible, score[k]);
  share_out<T>(group, score);
  if (row >= a.rows) return;
  forget(start);
  forget(row);
  T* y = static_cast<T*>(a.y) + row * a.n;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) store_vector<T, kPlain>(y, start + k * step, n, a.y_vectors, score[k]);
}

// Long rows without a mask, at a scale above 0. kTogether: several to a block, whose parts seldom fill their pieces.
template <class T, bool kTogether>
__global__ void __launch_bounds__(kMostThreads, 2) softmax_forward_waiting(const SoftmaxForward a) {
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ __align__(16) WaitingRoom<Powers<T>> room;
  Seat<Powers<T>> seat(room, a.cluster, 1, kTogether ? a.together : 1);
  if (kTogether && seat.row >= a.rows) return;
  let_next_start();
  wait_for_earlier();
  const Part<T> part(a.x, seat.row, a.rows, a.n, seat.place(), a.part, a.line);
  uint4* const slots = ring + seat.warp * a.part;
  if (seat.lane == 0) part.fetch(slots, room.arrived[seat.warp]);
  const float unit = unit_of<T>(a.scale);
  Powers<T> mine;
#pragma unroll 1
  for (int piece = 0; piece < part.pieces(); ++piece) {
    barrier_wait(&room.arrived[seat.warp][piece], 0);
    const int first = piece * kPieceSlots + seat.lane;
    if (kTogether && part.count - piece * kPieceSlots <= kWarp) {
      const uint4 raw[1] = {part.take(slots, first, kNothing<T>)};
      mine.take(raw, unit);
      continue;
    }
    uint4 raw[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) raw[k] = part.take(slots, first + k * kWarp, kNothing<T>);
    mine.take(raw, unit);
  }
  Powers<T> whole = mine.over_warp(unit);
  if (!kTogether || seat.count() > 1) whole = gather(seat.meet(whole), seat.count(), unit);
  const Top<T> top(whole.max, unit);
  const Share share = divide(1.f, whole.sum);
  T* const y = static_cast<T*>(a.y) + seat.row * a.n;
#pragma unroll 1
  for (int piece = 0; piece < part.pieces(); ++piece) {
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const int slot = piece * kPieceSlots + k * kWarp + seat.lane;
      if (kTogether && k > 0 && slot - seat.lane >= part.count) break;
      float value[kVector<T>];
      unpack<T>(part.take(slots, slot, kNothing<T>), value);
      top.raise(value, unit);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) value[i] = times<T>(value[i], share);
      part.put(y, slots, slot, value);
    }
    part.send(y, slots, piece);
  }
  if (seat.lane == 0) wait_for_copies_out();
}

template <class T>
__global__ void __launch_bounds__(512) softmax_forward_streamed(const SoftmaxForward a) {
  __shared__ MaxSum<T> shared[2 * kMaxStates];
  Group<MaxSum<T>> group(shared, a.cluster);
  let_next_start();
  wait_for_earlier();
  constexpr int kSize = kVector<T>;
  const int64_t step = int64_t(group.threads) * kSize;
  const int64_t row = group.first;
  const Row at = locate_row(a, row);
  const T* x = static_cast<const T*>(a.x) + row * a.n;
  T* y = static_cast<T*>(a.y) + row * a.n;
  const int head = elements_into_vector(x);
  const int64_t vectors = (a.n + head + kSize - 1) / kSize;
  const int64_t each = (vectors + group.blocks - 1) / group.blocks;
  const int64_t begin = (each * group.rank + group.lane) * kSize - head;
  const int64_t share_end = each * (group.rank + 1) * kSize - head;
  const int64_t end = share_end < a.n ? share_end : a.n;
  const int64_t seen = end < at.visible ? end : at.visible;
  MaxSum<T> mine{-kInfinity, 0.f, 0};
  for (int64_t from = begin; from < seen; from += kPiece * step) {
    uint4 raw[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) raw[k] = load_vector<T, false>(x, from + k * step, seen, true);
    float score[kPiece][kSize];
    float max = mine.max;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      score_vector<T, false>(a, at, raw[k], from + k * step, seen, score[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) max = fmaxf(max, score[k][i]);
    }
    mine.sum *= exponential<T>(mine.max - finite(max));
    mine.max = max;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) mine.sum += exponential<T>(score[k][i] - finite(max));
    }
  }
  MaxSum<T> warp{group.warp_max(mine.max), 0.f, 0};
  warp.sum = group.warp_sum(mine.sum * exponential<T>(mine.max - finite(warp.max)));
  const MaxSum<T> whole = meet<T, false>(warp, group);
  const Share share = divide(1.f, whole.sum);
  for (int64_t from = begin; from < end; from += step) {
    float score[kSize];
    score_vector<T, false>(a, at, load_vector<T, false>(x, from, seen, true), from, seen, score);
#pragma unroll
    for (int i = 0; i < kSize; ++i) score[i] = times<T>(exponential<T>(score[i] - finite(whole.max)), share);
    store_vector<T, false>(y, from, end, a.y_vectors, score);
  }
}

// ---- launcher ----

template <class T>
auto kernel_for(const RowPlan& plan, bool plain) -> void (*)(SoftmaxForward) {
  constexpr int kMost = kMostHeld<T>;
  if (plan.streamed) return softmax_forward_streamed<T>;
  if (plan.stages > 0) return nullptr;
  if (!plain && plan.held == 1) return softmax_forward_rows<T, 1, false, true>;
  if (!plain) return softmax_forward_rows<T, kMost, false, false>;
  if (!plan.one_warp && plan.held == kMost) return softmax_forward_rows<T, kMost, true, false>;
  if (!plan.one_warp && plan.held == 2) return softmax_forward_rows<T, 2, true, false>;
  if (!plan.one_warp) return plan.held == 1 ? softmax_forward_rows<T, 1, true, false> : nullptr;
  if (plan.held == kMost) return softmax_forward_rows<T, kMost, true, true>;
  if (plan.held == kMost / 2) return softmax_forward_rows<T, kMost / 2, true, true>;
  if (plan.held == kMost / 4) return softmax_forward_rows<T, kMost / 4, true, true>;
  return plan.held == 1 ? softmax_forward_rows<T, 1, true, true> : nullptr;
}

// Short rows at odd addresses, or of odd lines; false for others.
template <class T>
bool run_tiled(SoftmaxForward a, const Device& device, void* stream, int& error) {
  const int offsets = offset_in_vector(a.x) + offset_in_vector(a.y);
  if (a.n % kVector<T> == 0 && offsets == 0) {
    const Tiling plan = plan_vector_tiles<T>(a.rows, a.n, kMostHeld<T>, 1, device);
    a.part = plan.rows;
    if (plan.threads > 0) {
      error = launch_tiles(softmax_forward_tiled_vectors<T, kMostHeld<T>>, a, plan, device, stream, true);
    }
    return plan.threads > 0;
  }
  const Tiling plan = plan_tiles<T>(a.rows, a.n, offsets, 1, device);
  if (plan.threads == 0) return false;
  a.part = plan.rows;
  const bool few = a.n <= kWarp * kFewTiled;
  const auto kernel = few ? softmax_forward_tiled<T, kFewTiled> : softmax_forward_tiled<T, kManyTiled>;
  error = launch_tiles(kernel, a, plan, device, stream, true);
  return true;
}

constexpr int64_t kLongRow = 16384;  // beyond which a block's registers do not hold a row

// Of a block that shares an aligned row with others. Rows of 64 KB in bf16, in blocks of 64, 32, 16 and 8 KB: 0.935, 0.945,
// 0.967 and 0.809 of the copy bandwidth; of 100 KB at odd addresses, in blocks of 100, 50, 25 and 13 KB: 0.921, 0.912, 0.945
// and 0.857.
template <class T>
constexpr int64_t kBlockBytes = sizeof(T) == 4 ? 32768 : 16384;
constexpr int64_t kOddBlockBytes = 32768;

// Of a block of rows of fp32 that have more than kMaxCluster, as of 262,144 elements: 191.6 us, and by the 10 warps that a
// multiprocessor has registers for, whose last pieces are not full, 204.9; by 16 225.8, in clusters of 8 224.9.
constexpr int kLongWarps = 8;

// Long rows; false if the row fits no cluster.
template <class T>
bool run_waiting(SoftmaxForward a, bool aligned, const Device& device, void* stream, int& error) {
  if (!a.y_vectors || a.scale <= 0 || a.n <= (aligned ? kLongRow : kLongestTiled)) return false;
  Waiting plan = plan_waiting_together<T>(a.n, 1, device);
  const bool together = !aligned && plan.threads > 0;
  const Lines lines = lines_of<T>(a.n, a.x, a.y, a.y);
  a.line = together ? 16 : lines.bytes;
  if (!together) {
    const int64_t most = aligned ? kBlockBytes<T> : kOddBlockBytes;
    plan = plan_waiting<T>(a.rows, a.n, lines, 1, sizeof(WaitingRoom<Powers<T>>), device, most);
  }
  if (plan.threads == 0) return false;
  const int64_t vectors = vectors_of<T>(a.n, lines), long_part = vectors / (int64_t(plan.cluster) * kLongWarps);
  if (sizeof(T) == 4 && aligned && plan.cluster > kMaxCluster && plan.threads > kLongWarps * kWarp && long_part <= kPartSlots / 2) {
    plan.threads = kLongWarps * kWarp;
    plan.part = int(divide_up(divide_up(vectors, plan.cluster * kLongWarps), 8) * 8);
    plan.bytes = size_t(plan.part * kLongWarps * 16);
  }
  a.cluster = plan.cluster, a.part = plan.part, a.together = plan.together;
  bool fits = false;
  const auto kernel = together ? softmax_forward_waiting<T, true> : softmax_forward_waiting<T, false>;
  error = launch_waiting(kernel, a, plan, a.rows, device, stream, fits, true);
  return fits || error;
}

// Rows in the requested layout, aligned ones but those that wait; false where there is no such kernel.
template <class T>
bool run_requested(SoftmaxForward a, const RowChoice& requested, const Device& device, void* stream, int& error) {
  if (requested.kernel == RowKernel::packed) return run_packed<T>(a, device, stream, error);
  if (requested.kernel == RowKernel::tiles) return run_tiled<T>(a, device, stream, error);
  if (requested.kernel != RowKernel::copied || a.scale <= 0) return false;
  const Lines lines = lines_of<T>(a.n, a.x, a.y, a.y);
  const Waiting plan = requested_waiting<T>(requested, a.n, lines, 1, sizeof(WaitingRoom<Powers<T>>), device);
  if (plan.threads == 0) return false;
  a.line = lines.bytes;
  a.cluster = plan.cluster, a.part = plan.part, a.together = plan.together;
  bool fits = false;
  error = launch_waiting(softmax_forward_waiting<T, false>, a, plan, a.rows, device, stream, fits, true);
  return fits || error;
}

template <class T>
int run(SoftmaxForward a, const Device& device, void* stream) {
  constexpr int kSize = kVector<T>;
  const bool aligned = a.n % kSize == 0 && offset_in_vector(a.x) == 0 && offset_in_vector(a.y) == 0;
  const bool masked = a.causal || a.mask_kind != FUSELINE_MASK_NONE;
  const bool plain = aligned && a.mask_kind == FUSELINE_MASK_NONE;
  a.y_vectors = offset_in_vector(a.x) == offset_in_vector(a.y);
  a.mask_vectors = aligned && a.mask_kind != FUSELINE_MASK_NONE && a.mask_strides[3] == 1 &&
                   offset_in_vector(a.mask) == 0 && a.mask_strides[0] % kSize == 0 &&
                   a.mask_strides[1] % kSize == 0 && a.mask_strides[2] % kSize == 0;
  const bool measuring = row_overrides[FUSELINE_SOFTMAX_FORWARD].given;
  int failed = 0;
  const RowChoice* const choice = choice_for(FUSELINE_SOFTMAX_FORWARD, sizeof(T), a.n);
  const bool waits = choice && choice->kernel == RowKernel::copied && a.y_vectors;
  if ((plain || waits) && !masked && choice && choice->kernel != RowKernel::rules &&
      (measuring || are_many(a.rows, a.rows * a.n * int64_t(sizeof(T)), device))) {
    if (run_requested<T>(a, *choice, device, stream, failed)) return failed;
    if (measuring) return FUSELINE_UNSUPPORTED;
  }
  if (plain && !masked && !measuring && run_few<T>(a, device, stream, failed)) return failed;
  RowPlan plan = plan_few_softmax(a.rows, a.n / kSize, kMostHeld<T>, device);
  const bool few = plain && !measuring && plan.fits;
  if (!masked && !few && !measuring) {
    int error = 0;
    if (plain && run_packed<T>(a, device, stream, error)) return error;
    if (run_tiled<T>(a, device, stream, error) || run_waiting<T>(a, plain, device, stream, error)) return error;
  }
  if (!few) {
    plan = plan_rows(FUSELINE_SOFTMAX_FORWARD, sizeof(T), a.rows, a.n, plain, false, kMostHeld<T>, device);
  }
  a.cluster = plan.cluster;
  const auto kernel = plan.fits ? kernel_for<T>(plan, plain) : nullptr;
  if (!kernel) return FUSELINE_UNSUPPORTED;
  return launch(kernel, a, grid_for(plan, a.rows), dim3(plan.threads, plan.rows), 0, plan.cluster, stream,
                device.clusters);
}

}  // namespace
}  // namespace fuseline

int fuseline_softmax_forward(const void* x, const void* mask, int mask_kind, const int64_t mask_strides[4], int64_t B,
                             int64_t H, int64_t T, int64_t S, double scale, int causal, void* y, int dtype,
                             void* stream) {
  using namespace fuseline;
  if (B < 0 || H < 0 || T < 0 || S < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype) || mask_kind < FUSELINE_MASK_NONE || mask_kind > FUSELINE_MASK_ADD_FP32) {
    return FUSELINE_UNSUPPORTED;
  }
  if (B == 0 || H == 0 || T == 0 || S == 0) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  SoftmaxForward a{};
  a.x = x, a.mask = mask, a.y = y;
  if (mask_kind != FUSELINE_MASK_NONE) std::copy(mask_strides, mask_strides + 4, a.mask_strides);
  a.rows = B * H * T, a.n = S, a.heads = H, a.height = T;
  a.scale = float(scale), a.mask_kind = mask_kind, a.causal = causal != 0;
  int failed = 0;
  if ((a.causal || mask_kind != FUSELINE_MASK_NONE) && run_softmax_masked(a, dtype, device, stream, failed)) return failed;
  return with_dtype(dtype, [&](auto type) { return run<decltype(type)>(a, device, stream); });
}
