// The cross-entropy of each row of logits with its target, and in the same pass, if asked, its gradient:
//   z = cap * tanh(logits / cap), lse = log(sum(e^z)), p = e^(z - lse)
//   loss = (1 - s) w_t (lse - z_t) + s / n * sum(w_c (lse - z_c)) + z_loss * lse^2
//   gradient = (p_c ((1 - s) w_t + s sum(w) / n + 2 z_loss lse) - s w_c / n - [c = t] (1 - s) w_t) (1 - (z / cap)^2)
//
// Moves: logits read once, and the gradient written once, in their place if asked. Does: two exponentials and about 14
// operations an element (two more of each with a cap). Limit: HBM bandwidth.
//
// Threads: a warp has a row that its lanes' registers hold (cross_entropy_short.cuh), of which those with options or at odd
// addresses, and parts of warps shorter ones, are packed into blocks (cross_entropy_packed.cuh). Longer rows have a block, or a
// cluster, that ends with them, and wait in shared memory (waiting.cuh): the maximum and the sum are taken as pieces
// arrive, and once the row has met they are read again for the gradient. The losses alone of many rows are taken in
// passing. What fits no cluster is read twice.

#include "cross_entropy_packed.cuh"
#include "cross_entropy_short.cuh"
#include "device/powers.cuh"

namespace fuseline {
namespace {

// The arguments without what few losses want, so that the compilers know.
template <bool kPlain>
__device__ __forceinline__ CrossEntropy known(CrossEntropy a) {
  if (kPlain) a.weight = a.weight_sum = nullptr, a.label_smoothing = a.soft_cap = a.inverse_cap = 0.f;
  return a;
}

// A thread's part of a row, as its vectors come by.
template <class T>
struct Running {
  MaxSum<T> so_far{-kInfinity, 0.f, 0};

  // Vectors first, first + step, .. as far as they are before `end`.
  template <class Index>
  __device__ __forceinline__ void take(const CrossEntropy& a, const uint4 (&raw)[kPiece], Index first, Index step,
                                       Index end) {
    constexpr int kSize = kVector<T>;
    float z[kPiece][kSize];
    float max = so_far.max;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const Index from = first + k * step < end ? first + k * step : Index(a.width);
      scores_of<T>(a, raw[k], from, z[k]);
      if (a.label_smoothing != 0.f) so_far.linear += linear_of<T>(a, from, z[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) max = fmaxf(max, z[k][i]);
    }
    so_far.sum *= exponential<T>(so_far.max - finite(max));
    so_far.max = max;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      float sum = 0.f;  // of a vector: its rounding is not that of the row
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum += exponential<T>(z[k][i] - finite(max));
      so_far.sum += sum;
    }
  }

  template <class Group>
  __device__ __forceinline__ MaxSum<T> of_warp(const Group& group) const {
    MaxSum<T> warp{group.warp_max(so_far.max), group.warp_sum(so_far.linear), 0};
    warp.sum = group.warp_sum(so_far.sum * exponential<T>(so_far.max - finite(warp.max)));
    return warp;
  }
};

// What one thread of the row reads before anybody overwrites the logits.
template <class T>
__device__ __forceinline__ float score_of_target(const CrossEntropy& a, const T* x, int64_t target, bool mine) {
  float z = 0.f;
  if (mine && is_column(a, target)) {
    z = to_float(x[target]);
    if (a.soft_cap > 0.f) z = capped<T>(z, a.soft_cap, a.inverse_cap);
  }
  return z;
}

// The row's statistics and loss, by that thread, and its gradient's makings for all.
template <class T>
__device__ __forceinline__ RowGradient finish_row(const CrossEntropy& a, int64_t row, int64_t target, float scale,
                                                  float score, const MaxSum<T>& whole, bool mine) {
  const float max = finite(whole.max), sum = float(whole.sum), log_sum = logf(sum);
  const bool ignored = is_ignored(a, target);
  const bool counts = !ignored && is_column(a, target);
  RowGradient gradient{0.f, ignored ? 0.f : kInfinity - kInfinity, 0.f, 0.f};
  if (counts) gradient = row_gradient(a, scale, target, max, sum, log_sum);
  if (mine) {
    if (a.statistics) a.statistics[row] = make_float2(max, sum);
    a.loss[row] = counts ? loss_of(a, target, score, max, log_sum, whole.linear) : gradient.factor;
  }
  return gradient;
}

template <class T, class Index>
__device__ __forceinline__ void store_gradient(const CrossEntropy& a, const RowGradient& gradient, bool ignored,
                                               Index target, Index first, T* grad, const uint4& raw) {
  float z[kVector<T>];
  scores_of<T>(a, raw, first, z);
  gradient_of<T, Index>(a, gradient, target, first, z);
  if (ignored) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) z[i] = 0.f;
  }
  store_vector<T, false>(grad, first, Index(a.width), a.grad_vectors, z);
}

// What the warps of a row tell each other: with a cap, smoothing or class weights sums of the scores themselves, too.
template <class T>
struct alignas(16) Scores {
  MaxSum<T> of;
};
template <class T, bool kPlain>
using Told = std::conditional_t<kPlain, Powers<T>, Scores<T>>;

template <class T>
__device__ __forceinline__ MaxSum<T> gather(const Scores<T>* states, int count) {
  MaxSum<T> row{-kInfinity, 0.f, 0};
#pragma unroll 1
  for (int i = int(threadIdx.x) % kWarp; i < count; i += kWarp) {
    row.max = fmaxf(row.max, states[i].of.max);
    row.linear += states[i].of.linear;
  }
  row.max = max_over_warp(row.max);
  row.linear = sum_over_warp(row.linear);
#pragma unroll 1
  for (int i = int(threadIdx.x) % kWarp; i < count; i += kWarp) {
    row.sum += states[i].of.sum * exponential<T>(states[i].of.max - finite(row.max));
  }
  row.sum = sum_over_warp(row.sum);
  return row;
}

// Rows that wait in shared memory.
template <class T, bool kPlain>
__global__ void __launch_bounds__(kMostThreads, kPlain ? 2 : 1) cross_entropy_waiting(const CrossEntropy given) {
  extern __shared__ __align__(128) uint4 ring[];
  using State = Told<T, kPlain>;
  __shared__ __align__(16) WaitingRoom<State> room;
  const CrossEntropy a = known<kPlain>(given);
  Seat<State> seat(room, a.cluster, 1);
  begin(a);
  const int64_t row = seat.row;
  const Part<T> part(a.logits, row, a.rows, a.width, seat.rank * seat.warps + seat.warp, a.part, a.line);
  uint4* const slots = ring + seat.warp * a.part;
  if (seat.lane == 0) part.fetch(slots, room.arrived[seat.warp]);
  const int64_t target = target_of(a, row);
  const bool mine = seat.rank == 0 && threadIdx.x == 0;
  float score = score_of_target(a, part.at, target, mine);
  const float unit = unit_of<T>(1.f);
  const int n = int(a.n);
  Powers<T> powers;
  Running<T> running;
#pragma unroll 1
  for (int piece = 0; piece < part.pieces(); ++piece) {
    barrier_wait(&room.arrived[seat.warp][piece], 0);
    const int slot = piece * kPieceSlots + seat.lane;
    uint4 raw[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) raw[k] = part.take(slots, slot + k * kWarp, kNothing<T>, n);
    if (kPlain) {
      powers.take(raw, unit);
    } else {
      running.take(a, raw, part.element(slot), kWarp * kVector<T>, part.element(part.count));
    }
  }
  score = __shfl_sync(kAllLanes, score, 0);  // it has been read before anybody writes the gradient in its place
  MaxSum<T> whole{-kInfinity, 0.f, 0};
  if constexpr (kPlain) {
    const Powers<T> row_powers = gather(seat.meet(powers.over_warp(unit)), seat.count(), unit);
    whole.max = row_powers.max, whole.sum = row_powers.sum;
  } else {
    const MaxSum<T> of_warp{max_over_warp(running.so_far.max), sum_over_warp(running.so_far.linear), 0};
    Scores<T> warp_scores{of_warp};
    warp_scores.of.sum =
        sum_over_warp(Total<T>(running.so_far.sum * exponential<T>(running.so_far.max - finite(of_warp.max))));
    whole = gather(seat.meet(warp_scores), seat.count());
  }
  const Top<T> top(whole.max, unit);
  const float rest = kPlain ? top.rest(unit) : 1.f;
  whole.sum *= rest;
  wait_for_total(a);
  const RowGradient gradient = finish_row<T>(a, row, target, scale_of(a, row), score, whole, mine);
  if (!a.grad) return;
  const bool ignored = is_ignored(a, target);
  const int column = is_column(a, target) ? int(target) : -(1 << 30);  // before all that a part has
  const float factor = gradient.factor * rest;
  T* const grad = static_cast<T*>(a.grad) + row * a.width;
#pragma unroll 1
  for (int piece = 0; piece < part.pieces(); ++piece) {
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const int slot = piece * kPieceSlots + k * kWarp + seat.lane;
      const int first = part.element(slot);
      float z[kVector<T>];
      const uint4 raw = part.take(slots, slot, kNothing<T>, n);
      if (kPlain) {
        unpack<T>(raw, z);
        top.raise(z, unit);
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) z[i] *= factor;
        if (column >= first && column < first + kVector<T>) {
#pragma unroll
          for (int i = 0; i < kVector<T>; ++i) z[i] -= first + i == column ? gradient.main : 0.f;
        }
      } else {
        scores_of<T>(a, raw, first, z);
        gradient_of<T, int>(a, gradient, column, first, z);
      }
      if (ignored) {
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) z[i] = 0.f;
      }
      part.put(grad, slots, slot, z);
    }
    part.send(grad, slots, piece);
  }
  if (seat.lane == 0) wait_for_copies_out();
}

using cross_entropy_plans::kFewerPassing, cross_entropy_plans::kMostPassing;

// The losses alone of rows without cap, smoothing and class weights: nothing of a row is wanted twice. us of 8,192 rows by blocks
// of 256 threads and by 512, whose vectors leave the L2 first: fp32 16,384 columns 192.7 and 183.7 (184.0 if not first, by 128
// threads 197.9, waiting in shared memory 197.5), 65,536 775.7 and 714.8, bf16 50,304 291.2 and 290.2, 131,072 717.6 and 714.8;
// 4,096 of fp32, that half of 512 threads have, 58.0 and 94.7.
template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) cross_entropy_passing(const CrossEntropy given) {
  __shared__ Powers<T> states[kThreads / kWarp];
  begin(given);
  const CrossEntropy a = known<true>(given);
  constexpr int kSize = kVector<T>;
  constexpr bool kLeaves = kThreads == kMostPassing;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int64_t row = blockIdx.x;
  const T* const x = static_cast<const T*>(a.logits) + row * a.width;
  const int n = int(a.n), head = elements_into_vector(x);
  const int64_t target = target_of(a, row);
  const float score = score_of_target(a, x, target, threadIdx.x == 0);
  const float unit = unit_of<T>(1.f);
  [[maybe_unused]] const uint64_t policy = policy_of(true);
  Powers<T> mine;
#pragma unroll 1
  for (int from = int(threadIdx.x) * kSize - head; from < n; from += kPiece * kThreads * kSize) {
    uint4 raw[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const int first = from + k * kThreads * kSize;
      if (kLeaves && first >= 0 && first + kSize <= n) {
        raw[k] = load_by(x + first, policy);
        continue;
      }
      raw[k] = load_vector<T, false>(x, first, n, true);
      if (first < 0 || first + kSize > n) blank<T>(raw[k], first, n, kNothing<T>);
    }
    mine.take(raw, unit);
  }
  mine = mine.over_warp(unit);
  if (lane == 0) states[warp] = mine;
  __syncthreads();
  if (warp > 0) return;
  const Powers<T> whole = gather(states, kThreads / kWarp, unit);
  const MaxSum<T> reduced{whole.max, 0.f, whole.sum * Top<T>(whole.max, unit).rest(unit)};
  finish_row<T>(a, row, target, 1.f, score, reduced, lane == 0);
}

// Rows that nothing can hold are read again for their gradient.
template <class T>
__global__ void __launch_bounds__(kMostThreads, 1) cross_entropy_streamed(const CrossEntropy a) {
  __shared__ MaxSum<T> shared[2 * kMaxStates];
  Group<MaxSum<T>> group(shared, 1);
  begin(a);
  constexpr int kSize = kVector<T>;
  const int64_t step = int64_t(group.threads) * kSize;
  const int64_t row = group.first;
  const T* const x = static_cast<const T*>(a.logits) + row * a.width;
  const int64_t begin = int64_t(group.lane) * kSize - elements_into_vector(x);
  const int64_t target = target_of(a, row);
  const bool mine = group.lane == 0;
  const float score = score_of_target(a, x, target, mine);
  Running<T> running;
  for (int64_t from = begin; from < a.width; from += kPiece * step) {
    uint4 raw[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) raw[k] = load_vector<T, false>(x, from + k * step, a.width, true);
    running.take(a, raw, from, step, a.width);
  }
  const MaxSum<T> whole = meet<T, true>(running.of_warp(group), group);
  wait_for_total(a);
  const RowGradient gradient = finish_row<T>(a, row, target, scale_of(a, row), score, whole, mine);
  if (!a.grad) return;
  T* const grad = static_cast<T*>(a.grad) + row * a.width;
  for (int64_t from = begin; from < a.width; from += step) {
    store_gradient<T, int64_t>(a, gradient, is_ignored(a, target), target, from, grad,
                               load_vector<T, false>(x, from, a.width, true));
  }
}

// ---- launcher ----

// `fits` is false where the device does not hold the plan's blocks; then nothing ran.
template <class T>
int run_as(const CrossEntropyPlan& plan, CrossEntropy a, bool plain, const Device& device, void* stream, bool& fits) {
  static_assert(sizeof(WaitingRoom<Told<T, true>>) == cross_entropy_plans::room(sizeof(T), true));
  static_assert(sizeof(WaitingRoom<Told<T, false>>) == cross_entropy_plans::room(sizeof(T), false));
  static_assert(kMostHeld<T> == cross_entropy_plans::most_held(sizeof(T)));
  const LaunchShape& shape = plan.shape;
  a.cluster = shape.cluster, a.part = plan.part, a.line = plan.line;
  switch (plan.kernel) {
    case CrossEntropyKernel::short_rows:
      if constexpr (!std::is_same_v<T, __half>) {
        const auto kernel = a.grad ? short_kernel<T, true>(plan.held) : short_kernel<T, false>(plan.held);
        return launch(kernel, a, shape.grid, dim3(unsigned(shape.threads * shape.beside)), 0, 1, stream, device.clusters);
      }
      return FUSELINE_UNSUPPORTED;
    case CrossEntropyKernel::waiting:
      return launch_waiting(plain ? cross_entropy_waiting<T, true> : cross_entropy_waiting<T, false>, a, shape, device, stream,
                            fits);
    case CrossEntropyKernel::passing:
      if constexpr (!std::is_same_v<T, __half>) {
        return launch(shape.threads == kMostPassing ? cross_entropy_passing<T, kMostPassing>
                                                    : cross_entropy_passing<T, kFewerPassing>,
                      a, shape, device, stream);
      }
      return FUSELINE_UNSUPPORTED;
    case CrossEntropyKernel::rows:
      if constexpr (!std::is_same_v<T, __half>) {
        if (plan.held == 1) return launch(cross_entropy_rows<T, 1>, a, shape, device, stream);
      }
      return launch(cross_entropy_rows<T, kMostHeld<T>>, a, shape, device, stream);
    case CrossEntropyKernel::streamed:
      return launch(cross_entropy_streamed<T>, a, shape, device, stream);
    default:
      return FUSELINE_UNSUPPORTED;
  }
}

template <class T>
int run(CrossEntropy a, const Device& device, void* stream) {
  a.grad_vectors = offset_in_vector(a.logits) == offset_in_vector(a.grad);
  const bool plain = a.soft_cap == 0.f && a.label_smoothing == 0.f && !a.weight;
  const CrossEntropyProblem problem{int(sizeof(T)),         a.rows, a.n, a.width, offset_in_line(a.logits),
                                    offset_in_line(a.grad), a.grad != nullptr,   plain,  std::is_same_v<T, __half>};
  for (Refused refused = Refused::nothing;;) {
    const CrossEntropyPlan plan = plan_cross_entropy(problem, device, refused);
    bool fits = true;
    const int error = run_as<T>(plan, a, plain, device, stream, fits);
    if (fits || error) return error;
    refused = plan.refusable;
  }
}

}  // namespace
}  // namespace fuseline

int fuseline_cross_entropy_forward(const void* logits, const void* target, int target_bytes, const float* weight,
                                   const float* weight_sum, const float* total, int counted, float* loss,
                                   float* statistics, void* grad, int64_t rows, int64_t n, int64_t width,
                                   int64_t ignore_index, double label_smoothing, double soft_cap, double z_loss, int dtype,
                                   void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0 || width < n) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype) || (target_bytes != 4 && target_bytes != 8)) return FUSELINE_UNSUPPORTED;
  if (rows == 0 || n == 0) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  CrossEntropy a{};
  a.logits = logits, a.target = target, a.weight = weight, a.weight_sum = weight_sum, a.total = total;
  a.loss = loss, a.statistics = reinterpret_cast<float2*>(statistics), a.grad = grad;
  a.rows = rows, a.n = n, a.width = width, a.ignore_index = ignore_index;
  a.label_smoothing = float(label_smoothing), a.z_loss = float(z_loss);
  a.soft_cap = float(soft_cap), a.inverse_cap = soft_cap > 0 ? float(1 / soft_cap) : 0.f;
  a.int32_targets = target_bytes == 4, a.counted = counted && total && grad && device.clusters;
  return with_dtype(dtype, [&](auto type) { return run<decltype(type)>(a, device, stream); });
}
