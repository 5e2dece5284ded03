// What the norms' kernels of long rows by teams of blocks have in common (sm_90): each block has the same few columns of all
// rows of its team, and rows meet through the L2, several of them on their way at a time.
//
// A row's vectors of memory are divided evenly over the blocks of its team. All rows of a team begin at the same element of a
// vector, so that threads own the same columns of each and move whole vectors, wherever rows stand.
//
// Warps: those that compute, one vector of each row a lane; one whose first lane sends for rows; one that adds up what the
// others have of a row and posts it; and some that wait for what all blocks of the team posted. A word of mail is there when it
// is no longer kNoMail, which no sum is: that is what all were set to before the launch.
#pragma once

#include "norm_backward_ring_parts.cuh"
#include "norm_row.cuh"

namespace fuseline {

constexpr int kTeamWarps = 16;      // that compute, at most
constexpr int kCollectors = 2;      // warps that wait for mail
constexpr int kTeamThreads = (kTeamWarps + 2 + kCollectors) * kWarp;
constexpr int kMostTeamStages = 24, kMostTeamAhead = 8;
constexpr int kMostTeamBlocks = 160;  // of a team
constexpr int kLineVectors = 8;
constexpr unsigned long long kNoMail = ~0ull;

struct Team {
  unsigned long long* mail;  // [rows, blocks]
  int teams, blocks;         // and of each
  int stages, ahead;         // rows in shared memory, and how many of them wait for mail
  int part;                  // bytes of a tensor's part of a row in shared memory
  bool bulk;                 // results leave in bulk copies
};

struct TeamStatics {
  uint64_t arrived[kMostTeamStages], taken[kMostTeamStages], summed[kMostTeamAhead + 1], ready[kMostTeamAhead + 1];
  float2 statistics[kMostTeamStages];
  float4 terms[kMostTeamAhead + 1];
  float2 sums[kMostTeamAhead + 1][kTeamWarps];
};

// A block's vectors of a row whose first element is the `head`-th of its vector.
struct TeamPart {
  int first, count;

  __device__ __forceinline__ TeamPart(int n, int head, int size, int place, int blocks) {
    const int vectors = (n + head + size - 1) / size, lines = (vectors + kLineVectors - 1) / kLineVectors;
    first = int(uint32_t(place) * uint32_t(lines) / uint32_t(blocks)) * kLineVectors;
    count = min(int(uint32_t(place + 1) * uint32_t(lines) / uint32_t(blocks)) * kLineVectors, vectors) - first;
    count = max(count, 0);
  }

  // Elements that are columns of the row.
  __device__ __forceinline__ int columns(int n, int head, int size) const {
    return max(0, min(n, (first + count) * size - head) - max(0, first * size - head));
  }
};

// A counter of places in a ring, with the parity of its barrier.
struct RingPlace {
  int at = 0, parity = 0;
  __device__ __forceinline__ void next(int count) {
    if (++at == count) at = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void post(unsigned long long* to, float2 value) {
  unsigned long long word = uint64_t(__float_as_uint(value.y)) << 32 | __float_as_uint(value.x);
  if (word == kNoMail) word = 0x7fffffff7fffffffull;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

__device__ __forceinline__ unsigned long long look(const unsigned long long* at) {
  unsigned long long word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}

// As copy_out, of several copies together.
__device__ __forceinline__ void copy_out_with(void* global, const void* shared, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void commit_copies_out() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
template <int kLatest>
__device__ __forceinline__ void wait_for_all_but() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLatest) : "memory");
#endif
}

// What the blocks of a team posted of a row: lane by lane those of blocks lane, lane + kWarp, ..; take(i, value).
template <class Take>
__device__ __forceinline__ void collect(const unsigned long long* mail, int blocks, int lane, Take&& take) {
  constexpr int kEach = kMostTeamBlocks / kWarp;
  unsigned long long words[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) words[i] = lane + i * kWarp < blocks ? look(mail + lane + i * kWarp) : 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (lane + i * kWarp >= blocks) break;
    int tries = 0;  // for the trial alone
    while (words[i] == kNoMail) {
      words[i] = look(mail + lane + i * kWarp);
      if (++tries > 4000000) __trap();
    }
    take(lane + i * kWarp, make_float2(__uint_as_float(uint32_t(words[i])), __uint_as_float(uint32_t(words[i] >> 32))));
  }
}

__device__ __forceinline__ void open_team(TeamStatics& statics, const Team& team, int warps) {
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int stage = 0; stage < team.stages; ++stage) {
      barrier_init(&statics.arrived[stage], 1);
      barrier_init(&statics.taken[stage], warps);
    }
#pragma unroll 1
    for (int k = 0; k <= kMostTeamAhead; ++k) {
      barrier_init(&statics.summed[k], warps);
      barrier_init(&statics.ready[k], 1);
    }
    publish_barriers();
  }
  __syncthreads();
}

// ---- host ----

inline int64_t most_vectors_of_part(int64_t n, int size, int blocks) {
  const int64_t lines = divide_up(divide_up(n + size - 1, size), kLineVectors);
  return divide_up(lines, blocks) * kLineVectors;
}

// How many teams: as many as have room, in which all rows of a team stand alike; 0 if none.
inline int teams_for(int64_t n, int size, bool alike, const Device& device) {
  int step = 1;
  while (!alike && step * n % size != 0) step *= 2;
  for (int teams = device.processors / step * step; teams >= step; teams -= step) {
    if (most_vectors_of_part(n, size, device.processors / teams) <= kTeamWarps * kWarp) return teams;
  }
  return 0;
}

template <class Arguments>
int launch_team(void (*kernel)(Arguments), const Arguments& arguments, const Team& team, int64_t rows, int threads, size_t bytes,
                void* stream) {
  const cudaError_t cleared = cudaMemsetAsync(team.mail, 0xff, size_t(rows) * team.blocks * sizeof(*team.mail),
                                              static_cast<cudaStream_t>(stream));
  if (cleared != cudaSuccess) return int(cleared);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;  // all blocks are resident, or the launch fails
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(team.teams * team.blocks));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, arguments);
  const cudaError_t last = cudaGetLastError();
  return int(launched != cudaSuccess ? launched : last);
}

}  // namespace fuseline
