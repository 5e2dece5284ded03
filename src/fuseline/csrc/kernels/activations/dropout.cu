// y = dropout(x) or dropout(relu(x)), and the gradient of the latter. The mask is a function of a seed and a position
// (philox.cuh) and is not stored: the gradient of dropout alone is dropout of the incoming gradient with the same seed,
// and that of dropout(relu(x)) reads from y where the gradient goes.
//
// Moves: x read once, y written once; backward grad_y and y read once, grad_x written once. Does: about 15 integer
// operations an element for the mask, none in the backward. Limit: HBM bandwidth.
//
// Threads: each has kChunks chunks of the 8 elements that share a Philox block, with all their loads in flight before the
// first use; neighbours have neighbouring chunks. Tensors at odd addresses, and the last few elements, go one by one.
#include "device/launch.cuh"
#include "device/philox.cuh"
#include "fuseline_dropout.h"

namespace fuseline {
namespace {

constexpr int kChunk = 8, kChunks = 4, kThreads = 256;
constexpr int64_t kBlockElements = int64_t(kChunk) * kChunks * kThreads;

struct DropoutTask {
  const void* x;  // in the backward grad_y
  const void* y;  // in the backward what the forward returned, else null
  void* out;
  int64_t count;
  Dropout dropout;
  bool relu;     // before the dropout
  bool vectors;  // all tensors stand at multiples of 16 bytes
};

// 8 elements from `first`, zeros behind the last one.
template <class T>
struct Chunk {
  static constexpr int kVectors = kChunk / kVector<T>;
  uint4 raw[kVectors];

  __device__ __forceinline__ void load(const void* from, int64_t first, int64_t count, bool vectors) {
    const T* const at = static_cast<const T*>(from) + first;
    const int left = int(min(int64_t(kChunk), count - first));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      raw[v] = load_vector<T, false>(at, v * kVector<T>, left, vectors);
    }
  }
  __device__ __forceinline__ void values(float (&values)[kChunk]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float part[kVector<T>];
      unpack<T>(raw[v], part);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) values[v * kVector<T> + i] = part[i];
    }
  }
};

template <class T>
__device__ __forceinline__ void store_chunk(void* to, int64_t first, int64_t count, bool vectors,
                                            const float (&values)[kChunk]) {
  T* const at = static_cast<T*>(to) + first;
  const int left = int(min(int64_t(kChunk), count - first));
#pragma unroll
  for (int v = 0; v < Chunk<T>::kVectors; ++v) {
    float part[kVector<T>];
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) part[i] = values[v * kVector<T> + i];
    store_vector<T, false>(at, v * kVector<T>, left, vectors, part);
  }
}

// kBackward: of dropout(relu(x)).
template <bool kBackward, class T>
__global__ void __launch_bounds__(kThreads) dropout_elements(const DropoutTask a) {
  let_next_start();
  const int64_t start = int64_t(blockIdx.x) * kBlockElements + int64_t(threadIdx.x) * kChunk;
  constexpr int64_t kStep = int64_t(kThreads) * kChunk;
  wait_for_earlier();
  Chunk<T> x[kChunks], y[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t first = start + c * kStep;
    if (first >= a.count) continue;
    x[c].load(a.x, first, a.count, a.vectors);
    if constexpr (kBackward) y[c].load(a.y, first, a.count, a.vectors);
  }
  const uint64_t seed = kBackward ? 0 : uint64_t(*a.dropout.seed);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t first = start + c * kStep;
    if (first >= a.count) continue;
    float values[kChunk], factors[kChunk];
    x[c].values(values);
    if constexpr (kBackward) {
      float kept[kChunk];
      y[c].values(kept);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) factors[i] = kept[i] == 0.f ? 0.f : a.dropout.scale;
    } else {
      dropout_multipliers(a.dropout, seed, first, factors);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      // NaN passes through ReLU, as it does in torch.
      const float value = !kBackward && a.relu && values[i] <= 0.f ? 0.f : values[i];
      values[i] = value * factors[i];
    }
    store_chunk<T>(a.out, first, a.count, a.vectors, values);
  }
}

template <bool kBackward>
int run(DropoutTask a, int dtype, void* stream) {
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  a.vectors = true;
  for (const void* tensor : {a.x, a.y, static_cast<const void*>(a.out)}) a.vectors &= offset_in_vector(tensor) == 0;
  const int64_t grid = (a.count + kBlockElements - 1) / kBlockElements;
  return with_dtype(dtype, [&](auto type) {
    return launch(dropout_elements<kBackward, decltype(type)>, a, grid, dim3(kThreads), 0, 1, stream, device.clusters);
  });
}

bool is_probability(double p) { return p >= 0 && p <= 1; }

}  // namespace
}  // namespace fuseline

int fuseline_dropout(const void* x, void* y, int64_t count, double p, const int64_t* seed, int relu, int dtype,
                     void* stream) {
  using namespace fuseline;
  if (count < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype) || !is_probability(p) || !seed) return FUSELINE_UNSUPPORTED;
  if (count == 0) return 0;
  DropoutTask a{x, nullptr, y, count, dropout_of(seed, p), relu != 0};
  a.dropout.seed = seed;  // where p is 0, too: the kernel reads it
  return run<false>(a, dtype, stream);
}

int fuseline_relu_dropout_backward(const void* grad_y, const void* y, void* grad_x, int64_t count, double p, int dtype,
                                   void* stream) {
  using namespace fuseline;
  if (count < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype) || !is_probability(p)) return FUSELINE_UNSUPPORTED;
  if (count == 0) return 0;
  const DropoutTask a{grad_y, y, grad_x, count, dropout_of(nullptr, p)};
  return run<true>(a, dtype, stream);
}
