// Copies of 16 bytes from global to shared memory that a thread starts and waits for later, in groups.
#pragma once

#include <cstdint>

namespace fuseline {

// Past the L1; both addresses are multiples of 16 bytes.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

// Of the 16 bytes only the first `bytes` are read, and zeros stand for the others.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
}

// A word, at multiples of 4 bytes.
__device__ __forceinline__ void copy_word_async(uint32_t shared, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(from) : "memory");
}

// Closes the group of the copies since the last one; a group may be empty.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `kPending` youngest groups of this thread are still under way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t at) {
  uint4 raw;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "r"(at)
               : "memory");
  return raw;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t at) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}

__device__ __forceinline__ void store_shared(uint32_t at, const uint4& raw) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_word(uint32_t at, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}

// Asks the L2 for `bytes`, a multiple of 16, without reading them.
__device__ __forceinline__ void prefetch_to_l2(const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// A float of the shared memory of block `rank` of the cluster, where this block has `here`.
__device__ __forceinline__ float load_in_cluster(const float* here, int rank) {
  float value = 0;
#if __CUDA_ARCH__ >= 900
  const uint32_t local = uint32_t(__cvta_generic_to_shared(here));
  asm volatile(
      "{\n .reg .u32 remote;\n"
      " mapa.shared::cluster.u32 remote, %1, %2;\n"
      " ld.shared::cluster.f32 %0, [remote];\n}\n"
      : "=f"(value)
      : "r"(local), "r"(rank)
      : "memory");
#endif
  return value;
}

// Four of them, at a multiple of 16 bytes.
__device__ __forceinline__ float4 load_four_in_cluster(const float* here, int rank) {
  float4 four = make_float4(0.f, 0.f, 0.f, 0.f);
#if __CUDA_ARCH__ >= 900
  const uint32_t local = uint32_t(__cvta_generic_to_shared(here));
  asm volatile(
      "{\n .reg .u32 remote;\n"
      " mapa.shared::cluster.u32 remote, %4, %5;\n"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}\n"
      : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
      : "r"(local), "r"(rank)
      : "memory");
#endif
  return four;
}

}  // namespace fuseline
