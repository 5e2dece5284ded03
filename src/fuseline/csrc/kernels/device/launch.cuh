// The host's half of a row kernel: what the device offers, how many threads share a row, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../fuseline_kernels.h"
#include "group.cuh"
#include "vector.cuh"

namespace fuseline {

// What a launcher asks of the current device, looked up once a thread and device.
struct Device {
  int index = -1;
  int processors = 0;
  int shared_a_block = 0;      // bytes a block may ask for
  int shared_a_processor = 0;  // bytes all its blocks share
  bool clusters = false;
};

inline cudaError_t current_device(Device& device) {
  constexpr int kKept = 64;
  static thread_local Device kept[kKept];
  int index = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error != cudaSuccess) return error;
  if (index < kKept && kept[index].index == index) {
    device = kept[index];
    return cudaSuccess;
  }
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    const cudaError_t failed = cudaDeviceGetAttribute(&value, name, index);
    if (failed != cudaSuccess) error = failed;
    return value;
  };
  device.processors = attribute(cudaDevAttrMultiProcessorCount);
  device.shared_a_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device.shared_a_processor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  device.clusters = attribute(cudaDevAttrClusterLaunch) != 0;
  device.index = index;
  if (error == cudaSuccess && index < kKept) kept[index] = device;
  return error;
}

// Calls run(T{}) with the C++ type of a fuseline_dtype.
template <class Run>
int with_dtype(int dtype, Run&& run) {
  switch (dtype) {
    case FUSELINE_FLOAT32:
      return run(float{});
    case FUSELINE_FLOAT16:
      return run(__half{});
    case FUSELINE_BFLOAT16:
      return run(__nv_bfloat16{});
    default:
      return FUSELINE_UNSUPPORTED;
  }
}

inline bool known_dtype(int dtype) { return dtype >= FUSELINE_FLOAT32 && dtype <= FUSELINE_BFLOAT16; }

inline bool weights_fit(int weight_dtype, int dtype) {
  return weight_dtype == dtype || weight_dtype == FUSELINE_FLOAT32;
}

inline int offset_in_vector(const void* at) { return int(reinterpret_cast<uintptr_t>(at) % 16); }

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

inline int power_of_two_from(int64_t value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// How the threads of a kernel that holds its rows in registers are laid out.
struct RowPlan {
  int held = 0;            // 16-byte vectors a thread holds
  int threads = 0;         // that share a row, in one block
  bool one_warp = false;   // and are of one warp
  int rows = 1;            // that a block has at a time
  int cluster = 1;         // blocks that share a row
  bool streamed = false;   // the row does not fit: read it in pieces, and once more to write
};

// Tuning constants of such a kernel.
struct RowTuning {
  int held;             // most vectors a thread holds; / 2 and / 4 of it are there for short rows
  int neighbours;       // threads that read side by side before a thread holds more than one vector
};

// `vectors`: 16-byte vectors of a row, those at its ends that it does not fill included. Rows that do not keep to
// 16-byte steps know only 1 and `held` vectors a thread.
inline RowPlan plan_rows(int64_t vectors, bool aligned, const RowTuning& tuning, bool clusters) {
  RowPlan plan;
  if (vectors <= int64_t(kWarp) * tuning.held) {
    if (aligned) {
      plan.held = tuning.held / 4;
      while (plan.held < tuning.held && plan.held * tuning.neighbours < vectors) plan.held *= 2;
    } else {
      plan.held = vectors <= kWarp ? 1 : tuning.held;
    }
    plan.threads = power_of_two_from(divide_up(vectors, plan.held));
    plan.rows = kShortRowBlock / plan.threads;
    plan.one_warp = true;
    return plan;
  }
  plan.held = tuning.held;
  const int64_t threads = divide_up(vectors, tuning.held);
  while (clusters && plan.cluster < kMaxCluster && threads > int64_t(plan.cluster) * kMostThreads) {
    plan.cluster *= 2;
  }
  const int64_t a_block = divide_up(divide_up(threads, plan.cluster), kWarp) * kWarp;
  plan.streamed = a_block > kMostThreads;
  plan.threads = plan.streamed ? kMostThreads : int(a_block);
  return plan;
}

// Blocks for all rows. No memory holds rows enough for more than 2^31: short rows come 4 and more to a block.
inline int64_t grid_for(const RowPlan& plan, int64_t rows) { return divide_up(rows, plan.rows) * plan.cluster; }

template <class Arguments>
int launch(void (*kernel)(Arguments), const Arguments& arguments, int64_t grid, dim3 block, size_t shared,
           int cluster, void* stream) {
  if (grid > 0x7fffffff) return int(cudaErrorInvalidConfiguration);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(grid));
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, arguments);
  const cudaError_t last = cudaGetLastError();  // also clears it, so that no later call is blamed for it
  return int(launched != cudaSuccess ? launched : last);
}

}  // namespace fuseline
