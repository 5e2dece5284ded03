// What is being measured, from the environment; goes when it has been.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <type_traits>

namespace fuseline {

inline int trial(const char* name, int otherwise) {
  const char* const value = std::getenv(name);
  return value && *value ? std::atoi(value) : otherwise;
}

// Loads of rows: 0 past the L1, 1 plain, 2 to leave the L2 first, 3 both, 4 with the rest of 256 bytes, 5 that and 2.
__device__ __forceinline__ uint64_t leave_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <int kWay>
__device__ __forceinline__ uint4 load_as(const void* at, uint64_t policy) {
  uint4 raw;
  if constexpr (kWay == 0) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(at));
  } else if constexpr (kWay == 1) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(at));
  } else if constexpr (kWay == 2) {
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(at), "l"(policy));
  } else if constexpr (kWay == 3) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(at), "l"(policy));
  } else if constexpr (kWay == 4) {
    asm volatile("ld.global.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(at));
  } else {
    asm volatile("ld.global.L2::cache_hint.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4], %5;" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(at), "l"(policy));
  }
  return raw;
}

// load(way) with a number that the compilers know.
template <class Load>
__device__ __forceinline__ void by_way(int way, Load&& load) {
  switch (way) {
    case 0: return load(std::integral_constant<int, 0>{});
    case 1: return load(std::integral_constant<int, 1>{});
    case 2: return load(std::integral_constant<int, 2>{});
    case 3: return load(std::integral_constant<int, 3>{});
    case 4: return load(std::integral_constant<int, 4>{});
    default: return load(std::integral_constant<int, 5>{});
  }
}

}  // namespace fuseline
