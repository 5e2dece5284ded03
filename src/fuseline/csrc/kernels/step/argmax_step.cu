// tokens = argmax(logits), lengths += 1: what ends a decoding step that takes the most likely token.
//
// Moves: the logits once, 64 KB of a vocabulary of 32,000 in 16 bits, which the product before has left in the L2. Limit:
// the launch, and the latency of one read and one meeting; torch's argmax, copy and sum are three launches.
//
// Threads: a row belongs to a block, or where rows are few and long to the blocks of a cluster: one multiprocessor reads
// 64 KB in about 0.6 us, eight of them in no more than the latency. A thread takes whole 16-byte vectors, neighbouring threads
// neighbouring ones; what stands before the first and behind the last is one element to a thread. A thread, a warp and
// the row agree on the largest of 64-bit words, of which the upper half is the logit's rank and the lower one is larger
// for lower indices: whatever the order, the same token.
//
// It starts early, but the next kernel does not: attention reads lengths as soon as the launch before it lets it start
// (`overlap`), so that what writes them has to have ended before the first launch of a step begins.

#include "device/launch.cuh"
#include "device/meeting.cuh"
#include "fuseline_argmax_step.h"
#include "plans/argmax_step.h"

namespace fuseline {
namespace {

using Ranked = unsigned long long;  // 0 is below all
using Room = MeetingRoom<Ranked, 1, kMaxStates>;

struct ArgmaxStep {
  const void* logits;
  int64_t* tokens;
  int64_t* lengths;
  int64_t stride;
  int n, cluster;
};

constexpr int kHeld = 4;  // vectors of a thread that are on their way at once

// Of logits the larger comes after, and of equal ones that of the lower index. As torch ranks them: NaN of either sign
// above all, and zeros of either sign alike.
__device__ __forceinline__ Ranked ranked_as_torch(float logit, int index) {
  const uint32_t bits = __float_as_uint(logit != logit ? __int_as_float(0x7fffffff) : logit + 0.f);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return Ranked(ordered) << 32 | (0xffffffffu - uint32_t(index));
}

// Of logits in the order of their indices: whether this one takes the place of the best of those before.
__device__ __forceinline__ bool exceeds(float logit, float best) { return !(logit <= best) && best == best; }

// The largest of a warp: of the upper halves, then of the lower ones beside it.
__device__ __forceinline__ Ranked largest_ranked(Ranked mine) {
  const uint32_t upper = uint32_t(mine >> 32), lower = uint32_t(mine);
  const uint32_t most = __reduce_max_sync(kAllLanes, upper);
  return Ranked(most) << 32 | __reduce_max_sync(kAllLanes, upper == most ? lower : 0u);
}

template <class T>
__global__ void __launch_bounds__(kMostThreads) argmax_step(const ArgmaxStep a) {
  __shared__ Room room;
  const int thread = threadIdx.x, threads = blockDim.x, rank = int(blockIdx.x) % a.cluster;
  const int64_t row = int(blockIdx.x) / a.cluster;
  Meeting<Room, Ranked> meeting{room, a.cluster, rank};
  meeting.open();
  const bool writes = rank == 0 && thread == 0;
  const T* const logits = static_cast<const T*>(a.logits) + row * a.stride;
  constexpr int kSize = kVector<T>;
  const int before = min(a.n, (kSize - elements_into_vector(logits)) % kSize);
  const int vectors = (a.n - before) / kSize, behind = a.n - before - vectors * kSize;
  const int place = rank * threads + thread, places = a.cluster * threads;
  const int edge = place < before ? place : place < before + behind ? place + vectors * kSize : a.n;
  wait_for_earlier();
  const int64_t length = writes ? a.lengths[row] : 0;
  const float alone = edge < a.n ? to_float(logits[edge]) : 0.f;

  Ranked mine = 0;
  float best = -kInfinity;
  int index = before + place * kSize;  // the first of this thread, should all be -inf
#pragma unroll 1
  for (int first = place; first < vectors; first += kHeld * places) {
    uint4 raw[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int vector = first + k * places;
      if (vector < vectors) raw[k] = load_once(logits + before + vector * kSize);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int vector = first + k * places;
      if (vector >= vectors) break;
      float values[kSize];
      unpack<T>(raw[k], values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (exceeds(values[i], best)) best = values[i], index = before + vector * kSize + i;
      }
    }
  }
  if (place < vectors) mine = ranked_as_torch(best, index);
  if (edge < a.n) mine = max(mine, ranked_as_torch(alone, edge));

  mine = largest_ranked(mine);
  if (meeting.count() > 1) {
    meeting.publish(0, mine);
    const Ranked* const states = meeting.await(0);  // in each block of a cluster, so that none ends before all is sent to it
    if (rank != 0 || thread >= kWarp) return;
    mine = 0;
    for (int i = thread; i < meeting.count(); i += kWarp) mine = max(mine, states[i]);
    mine = largest_ranked(mine);
  }
  if (writes) a.tokens[row] = int64_t(0xffffffffu - uint32_t(mine)), a.lengths[row] = length + 1;
}

// ---- launcher ----

template <class T>
int run(ArgmaxStep a, int64_t rows, const Device& device, void* stream) {
  const LaunchShape shape = plan_argmax_step(rows, a.n, sizeof(T), device).shape;
  a.cluster = shape.cluster;
  return launch(argmax_step<T>, a, shape, device, stream);
}

}  // namespace
}  // namespace fuseline

int fuseline_argmax_step(const void* logits, int64_t* tokens, int64_t* lengths, int64_t rows, int64_t n,
                            int64_t stride, int dtype, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 1 || n > FUSELINE_MOST_LOGITS) return FUSELINE_BAD_SIZE;
  if (rows == 0) return known_dtype(dtype) ? 0 : FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  const ArgmaxStep a{logits, tokens, lengths, stride, int(n), 1};
  return with_dtype(dtype, [&](auto type) { return run<decltype(type)>(a, rows, device, stream); });
}
