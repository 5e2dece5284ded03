// The norm of all gradients in one launch.
//
// Moves: each gradient once. Limit: memory; of few gradients the launch and two meetings.
//
// Threads: a block has a run of neighboring pieces of 16 KB and looks once for the tensor that its first one belongs to; a
// lookup a piece takes longer than reading it. Each thread has four vectors on their way. Blocks begin in the order of the
// gradients, so that the L2 holds the last ones in the end, where AdamW begins. A block adds up in fp32 and leaves its sum; the
// last to arrive adds those up in fp64. Which block has which pieces depends on the device and the lengths alone, so that the
// bits are the same from run to run.

#include "optimizer/tensors.cuh"

namespace fuseline {
namespace {

constexpr int kHeld = 4;
constexpr int kAtOnce = 8;  // blocks of a multiprocessor
static_assert(kTensorBlock * kHeld * 16 == kPieceBytes);
constexpr int kWarps = kTensorBlock / kWarp;

struct GradientNorm {
  const void* grads[kMostGradients];
  int64_t counts[kMostGradients];
  uint32_t first[kMostGradients];
  uint8_t dtypes[kMostGradients];
  float *sums, *norm;
  uint32_t* arrived;
  int count;
  uint32_t pieces;
  uint32_t each;  // pieces of a block
  int before;  // sums that earlier launches left
  bool ends;   // this launch adds up
};
static_assert(sizeof(GradientNorm) <= kMostArgumentBytes);

// Adds the squares of `count` elements from `start` on; several sums, so that none waits for the one before. Elements before
// the first whole vector and behind the last go one by one.
template <class T>
__device__ __forceinline__ void add_squares(const void* grad, int64_t start, int count, float (&sums)[4]) {
  const T* const from = static_cast<const T*>(grad) + start;
  const int thread = threadIdx.x;
  const int before = min(count, int((16 - reinterpret_cast<uintptr_t>(from) % 16) % 16 / sizeof(T)));
  const int whole = (count - before) / kVector<T>;
  const T* at = from + before + thread * kVector<T>;
#pragma unroll 1
  for (int left = whole - thread; left > 0; left -= kHeld * kTensorBlock, at += kHeld * kTensorBlock * kVector<T>) {
    uint4 raw[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      raw[k] = k * kTensorBlock < left ? load_once(at + k * kTensorBlock * kVector<T>) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float values[kVector<T>];
      unpack<T>(raw[k], values);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) sums[i % 4] = __fmaf_rn(values[i], values[i], sums[i % 4]);
    }
  }
  if (thread < count - whole * kVector<T>) {
    const float value = to_float(from[thread < before ? thread : thread + whole * kVector<T>]);
    sums[0] = __fmaf_rn(value, value, sums[0]);
  }
}

// The sum over the block, in its first thread.
template <class Sum>
__device__ __forceinline__ Sum block_sum(Sum sum) {
  __shared__ Sum shared[kWarps];
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp];
  return sum;
}

__global__ void __launch_bounds__(kTensorBlock, kAtOnce) gradient_norm(const __grid_constant__ GradientNorm a) {
  let_next_start();
  const int thread = threadIdx.x;
  float sums[4] = {};
  uint32_t piece = blockIdx.x * a.each;
  const uint32_t end = min(piece + a.each, a.pieces);
  int index = tensor_of(a.first, 0, a.count, piece);
  wait_for_earlier();
#pragma unroll 1
  for (; piece < end; ++index) {
    const uint32_t next = index + 1 < a.count ? min(a.first[index + 1], end) : end;
    const int dtype = a.dtypes[index], elements = dtype == FUSELINE_FLOAT32 ? kPiece<float> : kPiece<__half>;
    const int64_t start = int64_t(piece - a.first[index]) * elements;
    const int count = int(min(int64_t(next - piece) * elements, a.counts[index] - start));
    if (dtype == FUSELINE_FLOAT32) {
      add_squares<float>(a.grads[index], start, count, sums);
    } else if (dtype == FUSELINE_BFLOAT16) {
      add_squares<__nv_bfloat16>(a.grads[index], start, count, sums);
    } else {
      add_squares<__half>(a.grads[index], start, count, sums);
    }
    piece = next;
  }
  const float mine = block_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  bool last = false;
  if (thread == 0) {
    a.sums[a.before + blockIdx.x] = mine;
    last = arrive(a.arrived) == gridDim.x - 1;
  }
  if (!__syncthreads_or(last)) return;
  if (thread == 0) *a.arrived = 0;
  if (!a.ends) return;
  __threadfence();
  double sum = 0;
  for (int i = thread; i < a.before + int(gridDim.x); i += kTensorBlock) sum += double(__ldcg(a.sums + i));
  sum = block_sum(sum);
  if (thread == 0) *a.norm = float(sqrt(sum));
}

// ---- launcher ----

TensorsPlan plan_on(const Device& device, const int64_t* counts, const int* dtypes, int64_t tensors) {
  return plan_gradient_norm(tensors, [&](int64_t i) { return counts[i]; }, [&](int64_t i) { return dtypes[i]; }, device);
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int64_t fuseline_gradient_norm_workspace(const int64_t* counts, const int* dtypes, int64_t tensors) {
  Device device;
  if (current_device(device) != cudaSuccess) return -1;
  const TensorsPlan plan = plan_on(device, counts, dtypes, tensors);
  return plan.code != 0 ? -1 : int64_t(plan.workspace / sizeof(float));
}

int fuseline_gradient_norm(const void* const* grads, const int64_t* counts, const int* dtypes, int64_t tensors, float* norm,
                           float* workspace, uint32_t* arrived, void* stream) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const TensorsPlan plan = plan_on(device, counts, dtypes, tensors);
  if (plan.code != 0) return plan.code;
  GradientNorm a{};
  a.sums = workspace, a.norm = norm, a.arrived = arrived;
  for (const TensorsLaunch& by : plan) {
    uint32_t first = 0;
    for (int64_t i = 0; i < by.tensors; ++i) {
      const int64_t at = by.first + i;
      a.grads[i] = grads[at], a.counts[i] = counts[at], a.dtypes[i] = uint8_t(dtypes[at]), a.first[i] = first;
      first += uint32_t(optimizer_plans::TensorSize{counts[at], dtypes[at]}.pieces());
    }
    a.count = int(by.tensors), a.pieces = uint32_t(by.pieces), a.each = uint32_t(by.each);
    a.ends = by.first + by.tensors == tensors;
    if (const int code = launch(gradient_norm, a, by.shape, device, stream)) return code;
    a.before += int(by.shape.grid);
  }
  return 0;
}

int64_t fuseline_gradient_norm_explain(const int64_t* counts, const int* dtypes, int64_t tensors,
                                       fuseline_tensors_launch* launches, int64_t most) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return -int64_t(error);
  return write_launches(plan_on(device, counts, dtypes, tensors), launches, most);
}
