// The host's half of the attention kernels: the tile width for a head dim, the grid, the launch.
#pragma once

#include <type_traits>

#include "attention_call.cuh"
#include "launch.cuh"

namespace fuseline {

constexpr int kNarrowHead = 32, kWidestHead = 256;  // of tiles

// Calls run with the tile width that holds a head, of those from kLeast to kMost.
template <int kLeast, int kMost, class Run>
int with_head_dim(int64_t head_dim, Run&& run) {
  if constexpr (kLeast < kMost) {
    if (head_dim > kLeast) return with_head_dim<2 * kLeast, kMost>(head_dim, run);
  }
  return run(std::integral_constant<int, kLeast>{});
}

// The widths of tiles of general attention by products of warps. Of plain scores in fp16, which no model has, heads of up to 64
// share one, and wider ones than 128 are not plain.
template <class T, bool kPlain, class Run>
int with_tiles(int64_t head_dim, Run&& run) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  return with_head_dim<kPlain && !kHalf ? kNarrowHead : 64, kPlain && kHalf ? 128 : kWidestHead>(head_dim, run);
}

// Whether kernels of plain scores compute a call, and whether on Hopper products of warpgroups do.
inline bool takes_plain(const Attention& a) {
  return plain_scores(a) && (a.call.dtype != FUSELINE_FLOAT16 || a.call.head_dim <= 128);
}
inline bool takes_panels(const Attention& a, const Device& device) {
  const bool narrow = a.call.dtype != FUSELINE_FLOAT16 && takes_plain(a) && a.call.head_dim <= kNarrowHead;
  return device.warpgroups && a.call.dtype != FUSELINE_FLOAT32 && a.call.head_dim <= 128 && !narrow;
}

// A block for every tile, head and sequence: of keys or of query rows.
struct AttentionGrid {
  int tiles;
  int64_t blocks;
  AttentionGrid(const fuseline_attention& c, int64_t heads, bool of_keys, int rows_a_tile) {
    const bool packed = c.cu_seqlens_q != nullptr;
    const int64_t length = of_keys ? (packed ? c.max_seqlen_k : c.seqlen_k) : packed ? c.max_seqlen_q : c.seqlen_q;
    const int64_t sequences = packed ? c.sequences + 1 : c.batch;  // the last for what is behind the others
    tiles = int(packed ? std::max<int64_t>(1, divide_up(length, rows_a_tile)) : divide_up(length, rows_a_tile));
    blocks = tiles * heads * sequences;
  }
};

// Kernels that may have more than 48 KB of shared memory on a device, and how much, the last of this thread.
struct Granted {
  const void* kernel;
  int device, bytes;
};
constexpr int kGranted = 32;
inline Granted* granted() {
  static thread_local Granted kept[kGranted] = {};
  return kept;
}
inline bool is_granted(const void* kernel, int device, int bytes) {
  return std::any_of(granted(), granted() + kGranted, [&](const Granted& one) {
    return one.kernel == kernel && one.device == device && one.bytes >= bytes;
  });
}
inline void grant(const void* kernel, int device, int bytes) {
  static thread_local int next = 0;
  for (Granted* one = granted(); one != granted() + kGranted; ++one) {
    if (one->kernel == kernel && one->device == device) {
      one->bytes = bytes;
      return;
    }
  }
  granted()[next] = {kernel, device, bytes};
  next = (next + 1) % kGranted;
}

// Launches a kernel of (arguments, tiles) with `shared` bytes of dynamic shared memory; `early`: it waits for the kernel
// before itself (overlap.cuh).
template <class Arguments>
int launch_attention(void (*kernel)(Arguments, int), const Arguments& arguments, const AttentionGrid& grid, int threads,
                     int shared, void* stream, bool early = false) {
  if (grid.blocks == 0) return 0;
  if (grid.blocks > 0x7fffffff) return int(cudaErrorInvalidConfiguration);
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  if (shared > device.shared_a_block) return FUSELINE_UNSUPPORTED;
  if (shared > 48 * 1024 && !is_granted(reinterpret_cast<const void*>(kernel), device.index, shared)) {
    error = allow_shared(reinterpret_cast<const void*>(kernel), shared);
    if (error != cudaSuccess) return int(error);
    grant(reinterpret_cast<const void*>(kernel), device.index, shared);
  }
  cudaLaunchAttribute attribute = overlapping();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(grid.blocks)), config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared), config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute, config.numAttrs = early && device.clusters ? 1 : 0;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, arguments, grid.tiles);
  const cudaError_t last = cudaGetLastError();  // also clears it
  return int(launched != cudaSuccess ? launched : last);
}

}  // namespace fuseline
