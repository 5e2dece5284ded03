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
#include "softmax.cuh"
#include "softmax_forward_few.cuh"
#include "softmax_forward_tiled.cuh"
#include "softmax_packed.cuh"

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

// A kernel for at least as many vectors a thread as the plan has. Of 16 bits, blocks of one vector a thread are the few rows'
// kernel's, but for rows that it does not take.
template <class T>
auto row_kernel(const SoftmaxPlan& plan, bool plain) -> void (*)(SoftmaxForward) {
  constexpr int kMost = kMostHeld<T>, kLeastOfBlock = sizeof(T) == 4 ? 1 : 2;
  if constexpr (std::is_same_v<T, __half>) {  // which no model has: one number of vectors
    if (!plain) return softmax_forward_rows<T, kMost, false, false>;
    return plan.one_warp ? softmax_forward_rows<T, kMost, true, true> : softmax_forward_rows<T, kMost, true, false>;
  } else {
    if (!plain && plan.held == 1) return softmax_forward_rows<T, 1, false, true>;
    if (!plain) return softmax_forward_rows<T, kMost, false, false>;
    if (!plan.one_warp && plan.held > 2) return softmax_forward_rows<T, kMost, true, false>;
    if (!plan.one_warp && plan.held == 2) return softmax_forward_rows<T, 2, true, false>;
    if (!plan.one_warp) return softmax_forward_rows<T, kLeastOfBlock, true, false>;
    if (plan.held > 2) return softmax_forward_rows<T, kMost, true, true>;
    if (plan.held == 2) return softmax_forward_rows<T, 2, true, true>;
    return softmax_forward_rows<T, 1, true, true>;
  }
}

// `fits` is false where the device does not hold the plan's blocks; then nothing ran.
template <class T>
int run_as(const SoftmaxPlan& plan, SoftmaxForward a, int dtype, bool plain, const Device& device, void* stream, bool& fits) {
  static_assert(sizeof(WaitingRoom<Powers<T>>) == softmax_plans::forward_room(sizeof(T)));
  static_assert(kMostHeld<T> == softmax_plans::most_held_forward(sizeof(T)));
  const LaunchShape& shape = plan.shape;
  a.part = plan.part, a.together = plan.together, a.line = plan.line, a.cluster = shape.cluster;
  switch (plan.kernel) {
    case SoftmaxKernel::few:
      if constexpr (std::is_same_v<T, __nv_bfloat16>) return run_few<T>(a, plan, device, stream);
      return FUSELINE_UNSUPPORTED;
    case SoftmaxKernel::packed:
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return launch(plan.blocks == 3 ? softmax_forward_packed<T, 3> : softmax_forward_packed<T, 2>, a, shape, device, stream);
      }
      return FUSELINE_UNSUPPORTED;
    case SoftmaxKernel::tiled:
      if constexpr (kSpecial<T>) {
        return launch_tiles(plan.held == kFewTiled ? softmax_forward_tiled<T, kFewTiled> : softmax_forward_tiled<T, kManyTiled>,
                            a, shape, device, stream);
      }
      return FUSELINE_UNSUPPORTED;
    case SoftmaxKernel::tiled_vectors:
      if constexpr (kSpecial<T>) return launch_tiles(softmax_forward_tiled_vectors<T, kMostHeld<T>>, a, shape, device, stream);
      return FUSELINE_UNSUPPORTED;
    case SoftmaxKernel::waiting:
      return launch_waiting(softmax_forward_waiting<T, false>, a, shape, device, stream, fits);
    case SoftmaxKernel::waiting_together:
      if constexpr (kSpecial<T>) return launch_waiting(softmax_forward_waiting<T, true>, a, shape, device, stream, fits);
      return FUSELINE_UNSUPPORTED;
    case SoftmaxKernel::masked:
      return run_softmax_masked(a, plan, dtype, device, stream);
    case SoftmaxKernel::rows:
      return launch(row_kernel<T>(plan, plain), a, shape, device, stream);
    case SoftmaxKernel::streamed:
      return launch(softmax_forward_streamed<T>, a, shape, device, stream);
    default:
      return FUSELINE_UNSUPPORTED;
  }
}

template <class T>
int run(SoftmaxForward a, int dtype, const Device& device, void* stream) {
  constexpr int kSize = kVector<T>;
  SoftmaxForwardProblem problem{};
  problem.element_size = sizeof(T), problem.rows = a.rows, problem.n = a.n, problem.scale = a.scale;
  problem.x_at = offset_in_line(a.x), problem.y_at = offset_in_line(a.y);
  problem.causal = a.causal, problem.masked = a.mask_kind != FUSELINE_MASK_NONE;
  problem.mask_vectors = problem.masked && a.mask_strides[3] == 1 && offset_in_vector(a.mask) == 0 &&
                         a.mask_strides[0] % kSize == 0 && a.mask_strides[1] % kSize == 0 && a.mask_strides[2] % kSize == 0;
  problem.fp16 = dtype == FUSELINE_FLOAT16;
  const bool aligned = a.n % kSize == 0 && offset_in_vector(a.x) == 0 && offset_in_vector(a.y) == 0;
  a.y_vectors = offset_in_vector(a.x) == offset_in_vector(a.y);
  a.mask_vectors = aligned && problem.mask_vectors;
  for (Refused refused = Refused::nothing;;) {
    const SoftmaxPlan plan = plan_softmax_forward(problem, device, refused);
    bool fits = true;
    const int error = run_as<T>(plan, a, dtype, aligned && !problem.masked, device, stream, fits);
    if (fits || error) return error;
    refused = plan.refusable;
  }
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
  return with_dtype(dtype, [&](auto type) { return run<decltype(type)>(a, dtype, device, stream); });
}
