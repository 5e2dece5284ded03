// Gradients of the layer norm, with x_hat = (x - mean) * rstd and g = grad_out:
//   grad_x = rstd * (g * w - mean(g * w) - x_hat * mean(g * w * x_hat))
//   grad_weight = sum over rows of g * x_hat, grad_bias = sum over rows of g
//
// Moves: x and grad_out read once, grad_x written once; besides, two fp32 rows a block of partial sums. Does: about 16
// operations an element. Limit: HBM bandwidth.
//
// Threads: the grid is as large as the device holds at once, and each group of threads (group.cuh) walks over rows with
// the same columns: kColumns a thread, kWide of them side by side. The sums for weight and bias stay in its registers
// over all its rows. The rows come through a ring in shared memory, several rows ahead (ring.cuh), so that loads go on
// while a group meets for the two means of its row. At the end each block writes one row of partial sums, and a second
// kernel adds those up in a fixed order: no atomics, the same bits each run.
//
// Rows longer than a cluster can hold take two other kernels (layer_norm_gradients.cuh).

#include "device/launch.cuh"
#include "device/layer_norm_gradients.cuh"
#include "device/ring.cuh"

namespace fuseline {
namespace {

// Columns first .. first + kWide of a row into a slot of the ring that only this thread uses.
template <class T, int kWide>
__device__ __forceinline__ void fetch(T* slot, const T* row, int first, bool wanted) {
  if constexpr (kWide * sizeof(T) >= 4) {
    copy_async<kWide * sizeof(T)>(slot, wanted ? row + first : row, wanted);
  } else {
    *slot = wanted ? row[first] : from_float<T>(0.f);
  }
}

template <class T, int kWide>
__device__ __forceinline__ void read_slot(const T* slot, float (&values)[kWide]) {
  if constexpr (kWide == 1) {
    values[0] = to_float(*slot);
  } else {
    unpack<T>(*reinterpret_cast<const uint4*>(slot), values);
  }
}

template <class T, int kWide>
__device__ __forceinline__ void weights_at(const LayerNormBackward& a, int first, float (&weight)[kWide]) {
#pragma unroll
  for (int i = 0; i < kWide; ++i) weight[i] = 1.f;
  if (a.weight && first < int(a.n)) load_weights<T, (kWide > 1)>(a.weight, a.fp32_weights, first, int(a.n), weight);
}

// Adds the sums of all rows that a block had, and writes them as its partial sums. `parts` holds a value for each
// column of each warp, or of each group of warps, that has its own sums.
template <int kColumns, int kWide>
__device__ __forceinline__ void write_partials(float (&sums)[kColumns], float* parts, float* partials, int from,
                                               int n) {
  const int threads = blockDim.x;
  const int tid = threadIdx.y * threads + threadIdx.x;
  for (int step = threads; step < kWarp; step *= 2) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[c] += __shfl_xor_sync(kAllLanes, sums[c], step);
  }
  const int columns = threads * kColumns;
  const int rows_a_part = threads < kWarp ? kWarp / threads : 1;
  const int part = threadIdx.y / rows_a_part;
  const int all = threads * int(blockDim.y);
  __syncthreads();  // the ring, or the sums before these, are done with
  if (int(threadIdx.y) % rows_a_part == 0) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      parts[part * columns + (c / kWide * threads + int(threadIdx.x)) * kWide + c % kWide] = sums[c];
    }
  }
  __syncthreads();
  const int count = int(blockDim.y) / rows_a_part;
  for (int c = tid; c < columns && from + c < n; c += all) {
    float sum = 0.f;
    for (int p = 0; p < count; ++p) sum += parts[p * columns + c];
    partials[from + c] = sum;
  }
}

// ---- kernels ----

// Most columns of a thread: two fp32 sums each, and still 512 threads to a multiprocessor (64 KiB of rows for each
// stage of the ring). Half as many, in rows that a warp can hold, leave room for 640.
template <class T>
constexpr int kMostColumns = sizeof(T) == 4 ? 16 : 32;

template <bool kOneWarp>
constexpr int kBlock = kOneWarp ? 640 : 512;

template <class T, int kColumns, int kWide, bool kOneWarp>
__global__ void __launch_bounds__(kBlock<kOneWarp>, 1) layer_norm_backward_rows(const LayerNormBackward a) {
  extern __shared__ uint4 ring[];
  __shared__ float2 shared[2 * kMaxStates];
  Group<float2, kOneWarp> group(shared, a.cluster);
  constexpr int kAccesses = kColumns / kWide;
  constexpr int kUnroll = kWide > 1 ? 2 : 8;
  const int n = int(a.n);
  int step = group.threads * kWide;
  int start = (group.rank * kAccesses * group.threads + group.lane) * kWide;
  // A stage of the ring: the accesses of x, then those of grad_out, each side by side for all threads of a full block.
  constexpr int kSlotStep = kBlock<kOneWarp> * kWide;
  constexpr int kStageStep = 2 * kAccesses * kSlotStep;
  T* const slots = reinterpret_cast<T*>(ring) + (int(threadIdx.y) * group.threads + group.lane) * kWide;
  const int64_t row_step = int64_t(gridDim.x / a.cluster) * blockDim.y;
  // Ends at a row past the last one, the same number of rounds for all groups of a block.
  const int64_t end = a.rows + threadIdx.y;
  const auto fetch_row = [&](int64_t row, T* to) {
    const bool wanted = row < a.rows;
    const T* x = static_cast<const T*>(a.x) + (wanted ? row * a.n : 0);
    const T* grad_out = static_cast<const T*>(a.grad_out) + (wanted ? row * a.n : 0);
    forget(start), forget(step);
#pragma unroll kUnroll
    for (int k = 0; k < kAccesses; ++k) {
      const int first = start + k * step;
      fetch<T, kWide>(to + k * kSlotStep, x, first, wanted && first < n);
      fetch<T, kWide>(to + (kAccesses + k) * kSlotStep, grad_out, first, wanted && first < n);
    }
    commit_copies();
  };

  int64_t row = int64_t(group.first) * blockDim.y + threadIdx.y;
  for (int stage = 0; stage < a.stages; ++stage) fetch_row(row + stage * row_step, slots + stage * kStageStep);
  float weight_sums[kColumns] = {}, bias_sums[kColumns] = {};
  float mean_next = row < a.rows ? a.mean[row] : 0.f;
  float rstd_next = row < a.rows ? a.rstd[row] : 0.f;
  int stage = 0;
  for (; row < end; row += row_step) {
    const float mean = mean_next, rstd = rstd_next;
    mean_next = row + row_step < a.rows ? a.mean[row + row_step] : 0.f;  // a row that is not there adds nothing
    rstd_next = row + row_step < a.rows ? a.rstd[row + row_step] : 0.f;
    wait_for_oldest(a.stages);

    // Both passes over the row read it from the ring, and the weights from L1: their registers are the sums'.
    T* const slot = slots + stage * kStageStep;
    stage = stage + 1 < a.stages ? stage + 1 : 0;
    float2 sums = make_float2(0.f, 0.f);
    forget(start), forget(step);
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      float x[kWide], grad[kWide], weight[kWide];
      read_slot<T, kWide>(slot + k * kSlotStep, x);
      read_slot<T, kWide>(slot + (kAccesses + k) * kSlotStep, grad);
      weights_at<T, kWide>(a, start + k * step, weight);
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        const float x_hat = (x[i] - mean) * rstd;
        weight_sums[k * kWide + i] += grad[i] * x_hat;
        bias_sums[k * kWide + i] += grad[i];
        const float weighted = grad[i] * weight[i];
        sums.x += weighted;
        sums.y += weighted * x_hat;
      }
    }
    if (a.grad_x) {
      sums = sum_over_row(sums, group);
      const float offset = sums.x / float(n), slope = sums.y / float(n);
      T* grad_x = static_cast<T*>(a.grad_x) + row * a.n;
      const int inside = row < a.rows ? n : 0;
      forget(start), forget(step);
#pragma unroll kUnroll
      for (int k = 0; k < kAccesses; ++k) {
        const int first = start + k * step;
        float x[kWide], grad[kWide], weight[kWide];
        read_slot<T, kWide>(slot + k * kSlotStep, x);
        read_slot<T, kWide>(slot + (kAccesses + k) * kSlotStep, grad);
        weights_at<T, kWide>(a, first, weight);
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
          const float x_hat = (x[i] - mean) * rstd;
          x[i] = (grad[i] * weight[i] - offset - x_hat * slope) * rstd;
        }
        if constexpr (kWide > 1) {
          store_vector<T, true>(grad_x, first, inside, true, x);
        } else if (first < inside) {
          grad_x[first] = from_float<T>(x[0]);
        }
      }
    }
    fetch_row(row + a.stages * row_step, slot);
  }
  wait_for_all();
  group.leave();
  if (a.partials) {
    const int from = group.rank * kColumns * group.threads;
    float* const mine = a.partials + int64_t(group.first) * n;
    float* const parts = reinterpret_cast<float*>(ring);
    write_partials<kColumns, kWide>(weight_sums, parts, mine, from, n);
    write_partials<kColumns, kWide>(bias_sums, parts, mine + int64_t(gridDim.x / a.cluster) * n, from, n);
  }
}

// ---- launchers ----

// How the rows-in-a-ring kernel is laid out. Rows that do not keep to 16-byte steps move an element at a time, which
// takes more registers an element: half the columns.
struct Plan {
  int columns = 0;        // a thread has
  int threads = 0;        // share a row, in one block
  bool one_warp = false;  // and are of one warp
  int rows = 1;           // a block has at a time
  int cluster = 1;        // blocks share a row
  int blocks = 0;         // in the grid, each with partial sums of its own (a cluster counts once)
  bool fits = true;       // or take the kernels for long rows
};

template <class T>
Plan plan_for(int64_t rows, int64_t n, bool aligned, const Device& device) {
  Plan plan;
  constexpr int kHalf = kMostColumns<T> / 2;
  plan.one_warp = aligned && n <= kWarp * kHalf;
  plan.columns = plan.one_warp || !aligned ? kHalf : 2 * kHalf;
  const int most_threads = plan.one_warp ? kBlock<true> : kBlock<false>;
  int64_t threads = divide_up(n, plan.columns);
  while (device.clusters && plan.cluster < kMaxCluster && threads > int64_t(plan.cluster) * most_threads) {
    plan.cluster *= 2;
  }
  threads = divide_up(threads, plan.cluster);
  plan.fits = threads <= most_threads;
  if (!plan.fits) {
    plan.blocks = int(std::min<int64_t>(rows, device.processors));
    return plan;
  }
  plan.threads = int(threads <= kWarp ? power_of_two_from(threads) : divide_up(threads, kWarp) * kWarp);
  if (plan.cluster == 1) {
    // Whole warps, and few rows spread over all multiprocessors rather than stacked on some.
    const int a_warp = std::max(1, kWarp / plan.threads);
    const int64_t spread = divide_up(divide_up(rows, device.processors), a_warp) * a_warp;
    plan.rows = int(std::min<int64_t>(most_threads / plan.threads, spread));
  }
  plan.blocks = int(std::min<int64_t>(std::max(1, device.processors / plan.cluster), divide_up(rows, plan.rows)));
  return plan;
}

// Clusters the device can hold at once, which its layout may make fewer than multiprocessors / cluster: a cluster too
// many would run after all others.
template <class Arguments>
cudaError_t clusters_at_once(void (*kernel)(Arguments), const Plan& plan, size_t shared, int& count) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(plan.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(plan.cluster));
  config.blockDim = dim3(unsigned(plan.threads));
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(&count, kernel, &config);
}

template <class T, int kColumns, int kWide, bool kOneWarp>
int run_rows(LayerNormBackward a, Plan& plan, const Device& device, void* stream) {
  const auto kernel = layer_norm_backward_rows<T, kColumns, kWide, kOneWarp>;
  constexpr int kStatic = 2 * kMaxStates * int(sizeof(float2));
  constexpr int kStage = kBlock<kOneWarp> * kColumns * int(sizeof(T)) * 2;
  const int room = device.shared_a_block - kStatic;
  a.stages = std::max(1, std::min(kMostStages, room / kStage));
  a.cluster = plan.cluster;
  const size_t shared = size_t(a.stages) * kStage;
  constexpr int kDevices = 64;
  static thread_local bool allowed[kDevices];
  static thread_local int at_once[kDevices][kMaxCluster + 1];
  const bool kept = device.index < kDevices;
  if (!kept || !allowed[device.index]) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   device.shared_a_block - kStatic);
    if (error != cudaSuccess) return int(error);
    if (kept) allowed[device.index] = true;
  }
  if (plan.cluster > 1) {
    int count = kept ? at_once[device.index][plan.cluster] : 0;
    if (count == 0) {
      const cudaError_t error = clusters_at_once(kernel, plan, shared, count);
      if (error != cudaSuccess) return int(error);
      if (kept) at_once[device.index][plan.cluster] = count;
    }
    plan.blocks = std::max(1, std::min(plan.blocks, count));
  }
  return launch(kernel, a, int64_t(plan.blocks) * plan.cluster, dim3(plan.threads, plan.rows), shared, plan.cluster,
                stream);
}

template <class T>
int run_long(const LayerNormBackward& a, const Plan& plan, void* stream) {
  if (a.grad_x) {
    const int error = launch(layer_norm_backward_long<T>, a, a.rows, dim3(kLongBlock), 0, 1, stream);
    if (error) return error;
  }
  if (!a.partials) return 0;
  const dim3 grid(unsigned(divide_up(a.n, kLongBlock)), unsigned(plan.blocks));
  layer_norm_partials_long<T><<<grid, kLongBlock, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return int(cudaGetLastError());
}

template <class T>
int run(LayerNormBackward a, const Device& device, void* stream) {
  constexpr int kMost = kMostColumns<T>;
  const bool aligned = a.n % kVector<T> == 0 && offset_in_vector(a.grad_out) == 0 && offset_in_vector(a.x) == 0 &&
                       offset_in_vector(a.weight) == 0 && offset_in_vector(a.grad_x) == 0;
  Plan plan = plan_for<T>(a.rows, a.n, aligned, device);
  int error = 0;
  if (!plan.fits) {
    error = run_long<T>(a, plan, stream);
  } else if (!aligned) {
    error = run_rows<T, kMost / 2, 1, false>(a, plan, device, stream);
  } else if (plan.one_warp) {
    error = run_rows<T, kMost / 2, kVector<T>, true>(a, plan, device, stream);
  } else {
    error = run_rows<T, kMost, kVector<T>, false>(a, plan, device, stream);
  }
  if (error || !a.partials) return error;
  const dim3 grid(unsigned(divide_up(a.n, kWarp)), 2);
  layer_norm_add_partials<T><<<grid, dim3(kWarp, kWarp), 0, static_cast<cudaStream_t>(stream)>>>(a, plan.blocks);
  return int(cudaGetLastError());
}

}  // namespace
}  // namespace fuseline

size_t fuseline_layer_norm_backward_workspace(int64_t rows, int64_t n, int dtype) {
  using namespace fuseline;
  Device device;
  if (rows <= 0 || n <= 0 || current_device(device) != cudaSuccess) return 0;
  int64_t blocks = 0;
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    blocks = std::max(plan_for<T>(rows, n, true, device).blocks, plan_for<T>(rows, n, false, device).blocks);
    return 0;
  });
  return size_t(2 * blocks * n) * sizeof(float);
}

int fuseline_layer_norm_backward(const void* grad_out, const void* x, const void* weight, const float* mean,
                                 const float* rstd, void* grad_x, void* grad_weight, void* grad_bias, void* workspace,
                                 int64_t rows, int64_t n, int dtype, int weight_dtype, void* stream) {
  using namespace fuseline;
  const bool sums = grad_weight || grad_bias;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (!known_dtype(dtype) || ((weight || sums) && !weights_fit(weight_dtype, dtype))) return FUSELINE_UNSUPPORTED;
  if (n == 0) return 0;
  if (rows == 0) {
    const size_t bytes = size_t(n) * (weight_dtype == FUSELINE_FLOAT32 ? 4 : 2);
    for (void* gradient : {grad_weight, grad_bias}) {
      if (!gradient) continue;
      const cudaError_t error = cudaMemsetAsync(gradient, 0, bytes, static_cast<cudaStream_t>(stream));
      if (error != cudaSuccess) return int(error);
    }
    return 0;
  }
  if (!grad_x && !sums) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  LayerNormBackward a{};
  a.grad_out = grad_out, a.x = x, a.weight = weight, a.mean = mean, a.rstd = rstd;
  a.grad_x = grad_x, a.grad_weight = grad_weight, a.grad_bias = grad_bias;
  a.partials = sums ? static_cast<float*>(workspace) : nullptr;
  a.rows = rows, a.n = n, a.fp32_weights = weight_dtype == FUSELINE_FLOAT32;
  return with_dtype(dtype, [&](auto type) { return run<decltype(type)>(a, device, stream); });
}
