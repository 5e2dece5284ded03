// A norm's weight and bias multiplied into the linear layer that reads the norm, and the gradients of all of them:
//   folded = weight * scale, added = bias + weight shift
//   grad_weight = grad * scale + grad_added shift^T, grad_scale = sum over rows of grad * weight,
//   grad_shift = weight^T grad_added
// of weight and grad [rows, n], scale and shift [n], bias and grad_added [rows], all of fp32.
//
// Moves: forward weight read and folded written once; backward grad and weight read and grad_weight written once, and fp32 rows of
// partial sums, one for each group of rows. Limit: HBM bandwidth, or the L2's, which such weights fit in.
//
// Threads: forward a warp has a row. Backward a warp has neighbouring columns and every so-manieth row of a group; warps' sums meet
// in shared memory, those of groups in a second kernel (activations/partials.cu), in a fixed order.
#include "activations/partials.h"
#include "device/launch.cuh"
#include "device/overlap.cuh"

namespace fuseline {
namespace {

constexpr int kFoldWarps = 8;          // of a block
constexpr int64_t kFoldBlocks = 4;     // a multiprocessor, backward
constexpr int kFoldRowsInFlight = 4;   // of a warp

struct FoldedNorm {
  const float *weight, *bias, *scale, *shift;  // bias and shift may be null
  float *folded, *added;                       // added: null without shift
  const float *grad, *grad_added;              // grad_added: null without shift
  float* partials;                             // [groups, 2, n]
  int64_t rows, n, group_rows;
};

template <int kWide>
struct Columns {
  float values[kWide];
  __device__ __forceinline__ void load(const float* from, bool there) {
    if constexpr (kWide == 4) {
      const float4 four = there ? *reinterpret_cast<const float4*>(from) : make_float4(0.f, 0.f, 0.f, 0.f);
      values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    } else {
      values[0] = there ? *from : 0.f;
    }
  }
  __device__ __forceinline__ void store(float* to) const {
    if constexpr (kWide == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
    } else {
      *to = values[0];
    }
  }
};

template <int kWide>
__global__ void __launch_bounds__(kFoldWarps* kWarp) fold_norm_forward(const FoldedNorm a) {
  let_next_start();
  wait_for_earlier();
  const int64_t row = int64_t(blockIdx.x) * kFoldWarps + threadIdx.y, base = row * a.n;
  if (row >= a.rows) return;
  float sum = 0.f;
#pragma unroll 4
  for (int64_t c = int64_t(threadIdx.x) * kWide; c < a.n; c += kWarp * kWide) {
    Columns<kWide> weight, scale, shift;
    weight.load(a.weight + base + c, true);
    scale.load(a.scale + c, true);
    shift.load(a.shift + c, a.shift);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      sum = fmaf(weight.values[i], shift.values[i], sum);
      weight.values[i] *= scale.values[i];
    }
    weight.store(a.folded + base + c);
  }
  if (!a.added) return;
#pragma unroll
  for (int by = kWarp / 2; by > 0; by /= 2) sum += __shfl_xor_sync(kAllLanes, sum, by);
  if (threadIdx.x == 0) a.added[row] = a.bias ? sum + a.bias[row] : sum;
}

template <int kWide>
__global__ void __launch_bounds__(kFoldWarps* kWarp) fold_norm_backward(const FoldedNorm a) {
  constexpr int kColumns = kWarp * kWide, kRows = kFoldRowsInFlight;
  __shared__ float shared[2][kFoldWarps][kColumns];
  let_next_start();
  wait_for_earlier();
  const int64_t from = int64_t(blockIdx.x) * kColumns, c = from + threadIdx.x * kWide;
  const bool inside = c < a.n;
  const int64_t first = int64_t(blockIdx.y) * a.group_rows, end = min(a.rows, first + a.group_rows);
  Columns<kWide> scale, shift;
  scale.load(a.scale + c, inside);
  shift.load(a.shift + c, inside && a.shift);
  float of_scale[kWide] = {}, of_shift[kWide] = {};
#pragma unroll 1
  for (int64_t row = first + threadIdx.y; row < end; row += kRows * kFoldWarps) {
    Columns<kWide> grad[kRows], weight[kRows];
    float added[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t of = row + r * kFoldWarps;
      const bool there = inside && of < end;
      grad[r].load(a.grad + of * a.n + c, there);
      weight[r].load(a.weight + of * a.n + c, there);
      added[r] = there && a.grad_added ? a.grad_added[of] : 0.f;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t of = row + r * kFoldWarps;
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        of_scale[i] = fmaf(grad[r].values[i], weight[r].values[i], of_scale[i]);
        of_shift[i] = fmaf(added[r], weight[r].values[i], of_shift[i]);
        grad[r].values[i] = fmaf(grad[r].values[i], scale.values[i], added[r] * shift.values[i]);
      }
      if (inside && of < end) grad[r].store(a.folded + of * a.n + c);
    }
  }
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    shared[0][threadIdx.y][i * kWarp + threadIdx.x] = of_scale[i];
    shared[1][threadIdx.y][i * kWarp + threadIdx.x] = of_shift[i];
  }
  __syncthreads();
  const int thread = int(threadIdx.y) * kWarp + int(threadIdx.x);
  for (int at = thread; at < 2 * kColumns; at += kFoldWarps * kWarp) {
    const int kind = at / kColumns, column = at % kColumns;
    if (from + column >= a.n) continue;
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < kFoldWarps; ++warp) sum += shared[kind][warp][column % kWide * kWarp + column / kWide];
    a.partials[(int64_t(blockIdx.y) * 2 + kind) * a.n + from + column] = sum;
  }
}

bool in_vectors(const FoldedNorm& a) {
  if (a.n % 4 != 0) return false;
  for (const void* each : {static_cast<const void*>(a.weight), static_cast<const void*>(a.scale), static_cast<const void*>(a.shift),
                           static_cast<const void*>(a.folded), static_cast<const void*>(a.grad)}) {
    if (offset_in_vector(each) != 0) return false;
  }
  return true;
}

// Groups of rows, each the sums of one block to a stretch of columns; as many for vectors as for single columns.
int64_t groups_of(int64_t rows, int64_t n, const Device& device) {
  const int64_t most = std::max<int64_t>(1, kFoldBlocks * device.processors / divide_up(n, 4 * kWarp));
  return std::clamp<int64_t>(divide_up(rows, kFoldWarps), 1, most);
}

}  // namespace
}  // namespace fuseline

int fuseline_fold_norm_forward(const float* weight, const float* bias, const float* scale, const float* shift, float* folded,
                               float* added, int64_t rows, int64_t n, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (rows == 0) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  FoldedNorm a{weight, bias, scale, shift, folded, added};
  a.rows = rows, a.n = n;
  return launch(in_vectors(a) ? fold_norm_forward<4> : fold_norm_forward<1>, a, divide_up(rows, kFoldWarps),
                dim3(kWarp, kFoldWarps), 0, 1, stream, device.clusters);
}

size_t fuseline_fold_norm_backward_workspace(int64_t rows, int64_t n) {
  using namespace fuseline;
  Device device;
  if (rows <= 0 || n <= 0 || current_device(device) != cudaSuccess) return 0;
  return size_t(groups_of(rows, n, device)) * 2 * size_t(n) * sizeof(float);
}

int fuseline_fold_norm_backward(const float* grad, const float* grad_added, const float* weight, const float* scale,
                                const float* shift, float* grad_weight, float* grad_vectors, void* workspace, int64_t rows, int64_t n,
                                void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (n == 0) return 0;
  if (rows == 0) return int(cudaMemsetAsync(grad_vectors, 0, size_t(n) * 2 * sizeof(float), static_cast<cudaStream_t>(stream)));
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  FoldedNorm a{weight, nullptr, scale, shift, grad_weight, nullptr, grad, grad_added, static_cast<float*>(workspace), rows, n};
  const int64_t most = groups_of(rows, n, device);
  a.group_rows = divide_up(rows, most);
  const int64_t groups = divide_up(rows, a.group_rows);
  const bool vectors = in_vectors(a);
  cudaLaunchAttribute attribute = overlapping();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(divide_up(n, kWarp * (vectors ? 4 : 1))), unsigned(groups));
  config.blockDim = dim3(kWarp, kFoldWarps);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = device.clusters ? 1 : 0;
  const cudaError_t launched = cudaLaunchKernelEx(&config, vectors ? fold_norm_backward<4> : fold_norm_backward<1>, a);
  const cudaError_t last = cudaGetLastError();
  if (launched != cudaSuccess || last != cudaSuccess) return int(launched != cudaSuccess ? launched : last);
  return run_add_partials(a.partials, groups, 2 * n, grad_vectors, FUSELINE_FLOAT32, device, stream);
}
