// What the norms' kernels for long rows by teams of blocks have in common (sm_90): each block has the same few columns of all
// rows of its team, so that weights and sums over rows are in registers, and rows meet through the L2, many of them on their way
// at a time.
//
// A row's vectors of memory are divided evenly over the blocks of its team. All rows of a team begin at the same element of a
// vector, so that threads own the same columns of each and move whole vectors, wherever rows stand.
//
// Warps: those that compute, a vector of each row a lane; one whose first lane sends for rows; one that adds up what the
// others have of a row and posts it; and two that wait for what all blocks of the team posted. A row computes its second pass
// `ahead` rows after its first: it waits in shared memory meanwhile. A word of mail is there when it is no longer kNoMail, to
// which all are set before the launch, and which no sum is.
#pragma once

#include "norm_backward_ring_parts.cuh"
#include "norm_row.cuh"

namespace fuseline {

constexpr int kTeamVectors = 512;  // of a block's part of a row, at most, and so many threads compute
constexpr int kCollectors = 2;     // warps that wait for mail
constexpr int kMostTeamWarps = kTeamVectors / kWarp;
constexpr int kTeamThreads = kTeamVectors + (2 + kCollectors) * kWarp;
constexpr int kMostTeamStages = 28, kMostTeamAhead = 16;
constexpr int kMostTeamBlocks = 160;  // of a team
constexpr int kLineVectors = 8;
constexpr unsigned long long kNoMail = ~0ull;

struct Team {
  unsigned long long* mail;  // [rows, blocks]
  int teams, blocks;         // and of each
  int stages, ahead;         // rows in shared memory, and how many of them wait for mail
  int part;                  // bytes of a tensor's part of a row in shared memory
};

struct TeamStatics {
  uint64_t arrived[kMostTeamStages], taken[kMostTeamStages], summed[kMostTeamAhead + 1], ready[kMostTeamAhead + 1];
  float2 statistics[kMostTeamStages];
  float4 terms[kMostTeamAhead + 1];
  float2 sums[kMostTeamAhead + 1][kMostTeamWarps];
};

// A block's vectors of a row that begins `head` elements into its first.
struct TeamPart {
  int first, count;

  __device__ __forceinline__ TeamPart(int n, int head, int size, int place, int blocks) {
    const uint32_t vectors = uint32_t(n + head + size - 1) / uint32_t(size);
    const uint32_t lines = (vectors + kLineVectors - 1) / kLineVectors;
    first = int(uint32_t(place) * lines / uint32_t(blocks)) * kLineVectors;
    count = max(min(int(uint32_t(place + 1) * lines / uint32_t(blocks)) * kLineVectors, int(vectors)) - first, 0);
  }

  // Elements of these that are columns of the row.
  __device__ __forceinline__ int columns(int n, int head, int size) const {
    return max(0, min(n, (first + count) * size - head) - max(0, first * size - head));
  }
};

// Where a block stands, and what of its team's rows it has.
template <class T>
struct TeamSeat {
  int team, place, warps;  // these that compute
  int count;               // rows of the team
  int head;
  TeamPart part;
  int64_t first_at, step;  // elements of the tensors: the first of its part of the first row, and from row to row

  __device__ __forceinline__ TeamSeat(const Team& t, const void* tensor, int64_t rows, int64_t n)
      : team(int(blockIdx.x) / t.blocks),
        place(int(blockIdx.x) % t.blocks),
        warps(int(blockDim.x) / kWarp - 2 - kCollectors),
        count(team < rows ? int((rows - 1 - team) / t.teams) + 1 : 0),
        head(elements_into_vector(static_cast<const T*>(tensor) + team * n)),
        part(int(n), head, kVector<T>, place, t.blocks),
        first_at(team * n - head + int64_t(part.first) * kVector<T>),
        step(t.teams * n) {}

  __device__ __forceinline__ int64_t row(const Team& t, int k) const { return team + int64_t(k) * t.teams; }
};

// A counter of places in a ring, with the parity of its barrier.
struct RingPlace {
  int at = 0, parity = 0;
  __device__ __forceinline__ void next(int count) {
    if (++at == count) at = 0, parity ^= 1;
  }
};

// In one access: beside stores of single elements the compiler makes four of a plain one.
__device__ __forceinline__ void write_vector(void* to, const uint4& raw) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w) : "memory");
}

// A thread's vector of a row: columns first .. first + kSize, of which the row's first and last vector have but some.
template <class T>
struct TeamVector {
  static constexpr int kSize = kVector<T>;
  int first, n;
  bool inside, whole;  // it is one of the block's, and all of the row's

  __device__ __forceinline__ TeamVector(const TeamPart& part, int vector, int head, int width)
      : first((part.first + vector) * kSize - head),
        n(width),
        inside(vector < part.count),
        whole(first >= 0 && first + kSize <= width) {}

  __device__ __forceinline__ bool has(int i) const { return first + i >= 0 && first + i < n; }

  __device__ __forceinline__ void take(const unsigned char* shared, float (&values)[kSize]) const {
    unpack<T>(*reinterpret_cast<const uint4*>(shared), values);
    if (!whole) {  // beyond the row stand others
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = has(i) ? values[i] : 0.f;
    }
  }

  __device__ __forceinline__ void put(T* to, const uint4& raw) const {
    if (whole) {
      write_vector(to, raw);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (has(i)) store_word(to + i, raw, i);
      }
    }
  }
};

__device__ __forceinline__ void post(unsigned long long* to, float2 value) {
  unsigned long long word = uint64_t(__float_as_uint(value.y)) << 32 | __float_as_uint(value.x);
  if (word == kNoMail) word = 0x7fffffff7fffffffull;  // NaN, too
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

__device__ __forceinline__ unsigned long long look(const unsigned long long* at) {
  unsigned long long word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}

// What the blocks of a team posted of a row, in order: a lane takes those of blocks lane, lane + kWarp, ..
template <class Take>
__device__ __forceinline__ void collect(const unsigned long long* mail, int blocks, int lane, Take&& take) {
  constexpr int kEach = kMostTeamBlocks / kWarp;
  unsigned long long words[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) words[i] = lane + i * kWarp < blocks ? look(mail + lane + i * kWarp) : 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (lane + i * kWarp >= blocks) break;
    while (words[i] == kNoMail) words[i] = look(mail + lane + i * kWarp);
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
    for (int k = 0; k <= team.ahead; ++k) {
      barrier_init(&statics.summed[k], warps);
      barrier_init(&statics.ready[k], 1);
    }
    publish_barriers();
  }
  __syncthreads();
}

}  // namespace fuseline
