// Bulk tensor copies: boxes of tensors that descriptors made on the host (tensor_map.h) name, to shared memory.
#pragma once

#include <cuda.h>

#include "meeting.cuh"

namespace fuseline {

__device__ __forceinline__ void fetch_tensor_map(const CUtensorMap* map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// Fetches the box at (k, row, outer) to `to`, and tells the barrier.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint64_t* barrier, int k, int row, int outer) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          to),
      "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(row), "r"(outer)
      : "memory");
#endif
}

// The same of a tensor of four dimensions.
__device__ __forceinline__ void copy_box_of_four(uint32_t to, const CUtensorMap* map, uint64_t* barrier, int k, int row,
                                                 int outer, int outermost) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(row), "r"(outer), "r"(outermost)
      : "memory");
#endif
}

// The same box for all blocks of the cluster whose bits are set in `blocks`, each of which has `to` and the barrier. In
// sources for sm_90a only: machine code for sm_90 has it, but slow.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint64_t* barrier, int k, int row, int outer,
                                         uint32_t blocks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, "
      "%5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(row), "r"(outer), "h"(uint16_t(blocks))
      : "memory");
#endif
}

}  // namespace fuseline
