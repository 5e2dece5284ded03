// gelu(x W^T + bias) and its slope, and what a backward has of them: (g W) * slope and the sums of its columns.
//
// Tiles, clusters and the ring of operands are those of head_tiles.cuh. Two warpgroups multiply, and hand a tile's sums on in
// 16 bits through shared memory; seven other warps take GELU of them, and write what comes of it in whole lines, while the next
// tile is multiplied. GELU in the warpgroups that multiply, in pieces beside the next products, took 184 us forward and 247
// backward (16,384 rows of 768 and 3,072, the product alone 118 and 123): beside products there is one warp a scheduler to
// hide its own latencies.
//
// Floor: the product's; beside it 16,384 x 3,072 elements move 67 us forward (two written) and 67 us backward (one read, one
// written).
#pragma once

#include <type_traits>

#include "activation.cuh"
#include "head_tiles.cuh"

namespace fuseline {

constexpr int kGeluStages = 4;
constexpr int kGeluThreads = 512;  // two warpgroups that multiply, seven warps that have their sums, one that copies
constexpr int kGeluMultiplier = 144, kGeluWorker = 112;  // registers
constexpr int kGeluRows = 64;      // of a warpgroup
constexpr int kGeluPanels = kHeadWide / 64;
constexpr int kGeluPanelBytes = kGeluRows * 128;  // lines of 128 bytes, the 16-byte pieces of line r in the places piece ^ (r % 8)
constexpr int kGeluSumsBytes = kGeluPanels * kGeluPanelBytes;
constexpr int kGeluShared = kGeluStages * kHeadStageBytes + 2 * kGeluSumsBytes + 1024 + 2 * kGeluStages * 8;
constexpr int kGeluLines = 4;   // of a group that a thread has, 4 apart
constexpr int kGeluGroups = 4;  // of 16 rows, of a warpgroup's
static_assert(kGeluShared + int(sizeof(float[2][2][kGeluGroups][kHeadWide])) <= 227 * 1024);

struct LinearGelu : HeadTiles {
  const void* bias;  // forward: or null
  void* slope;       // of GELU; forward: null if it is not wanted
  void* out;
  float* sums;  // backward: of what is written, [ceil(m / 64)][n], or null
  int m, n;
};

// Those who hand a warpgroup's sums on and those who take them, four warps of the first's and three of the second's, meet twice
// a tile: when there is room, and when they are there.
struct GeluMeeting {
  int half, threads;
  __device__ __forceinline__ explicit GeluMeeting(int of) : half(of), threads(of == 0 ? 256 : 224) {}
  __device__ __forceinline__ void wait_for_room() const { wait(1 + half, threads); }
  __device__ __forceinline__ void tell_room() const { tell(1 + half); }
  __device__ __forceinline__ void wait_for_sums() const { wait(3 + half, threads); }
  __device__ __forceinline__ void tell_sums() const { tell(3 + half); }
  __device__ __forceinline__ void takers_meet() const { wait(5 + half, threads - 128); }

 private:
  static __device__ __forceinline__ void wait(int barrier, int of) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(of) : "memory");
  }
  __device__ __forceinline__ void tell(int barrier) const {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  }
};

// A warp's 16 rows of sums, to the panels of its warpgroup.
template <class T>
__device__ __forceinline__ void store_gelu_sums(uint32_t panels, const float (&sums)[24][4]) {
  const int lane = int(threadIdx.x) % kWarp, line = int(threadIdx.x) % 128 / kWarp * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < 24; i += 2) {
    const int piece = i % 8 + lane / 16;
    const uint32_t at = panels + i / 8 * kGeluPanelBytes + line * 128 + ((piece ^ (line & 7)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(pack_pair<T>(sums[i][0], sums[i][1])), "r"(pack_pair<T>(sums[i][2], sums[i][3])),
                 "r"(pack_pair<T>(sums[i + 1][0], sums[i + 1][1])), "r"(pack_pair<T>(sums[i + 1][2], sums[i + 1][3]))
                 : "memory");
  }
}

// What a warp has of half a tile: units of 16 rows of a panel. Four warps have 16 rows and all panels, three have a panel and
// all rows. A thread has 8 columns of four rows of a unit.
struct GeluPart {
  int row, column, end_row, end_column;  // of the half; the thread's first are lane / 8 and lane % 8 * 8 further
  uint32_t panels;
  int warp, units;
  bool across;  // its units are panels

  __device__ __forceinline__ GeluPart(const LinearGelu& a, const HeadPlace& place, int rank, int half, uint32_t of) {
    row = (place.block * kHeadCluster + rank) * kHeadRows + half * kGeluRows, column = place.tile * kHeadWide;
    end_row = a.m, end_column = a.n, panels = of;
    warp = int(threadIdx.x) % 128 / kWarp, across = half == 0, units = across ? kGeluPanels : kGeluGroups;
  }
  __device__ __forceinline__ int group(int unit) const { return across ? warp : unit; }
  __device__ __forceinline__ int panel(int unit) const { return across ? unit : warp; }
  static __device__ __forceinline__ int line() { return int(threadIdx.x) % kWarp / 8; }
  __device__ __forceinline__ int first_column(int unit) const { return column + 64 * panel(unit) + int(threadIdx.x) % 8 * 8; }
  __device__ __forceinline__ int first_row(int unit) const { return row + 16 * group(unit) + line(); }

  __device__ __forceinline__ uint4 load(int unit, int i) const {
    const int piece = int(threadIdx.x) % 8 ^ line() ^ i % 2 * 4;
    const uint32_t at = panels + panel(unit) * kGeluPanelBytes + (16 * group(unit) + line() + 4 * i) * 128 + (piece << 4);
    uint4 raw;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "r"(at)
                 : "memory");
    return raw;
  }
  __device__ __forceinline__ bool inside(int unit, int i) const {
    return first_row(unit) + 4 * i < end_row && first_column(unit) < end_column;
  }
  __device__ __forceinline__ int64_t offset(int unit, int i) const {
    return int64_t(first_row(unit) + 4 * i) * end_column + first_column(unit);
  }
  template <class T>
  __device__ __forceinline__ uint4 load_bias(const LinearGelu& a, int unit) const {
    const int c = first_column(unit);
    if (!a.bias || unit >= units || c >= a.n) return make_uint4(0u, 0u, 0u, 0u);
    return __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.bias) + c));
  }
};

template <class T, class Activation, bool kTurned>
struct LinearGeluForward {
  using Given = LinearGelu;
  static constexpr bool kTurnLeft = false, kTurnRight = kTurned;

  static __device__ __forceinline__ void work(const LinearGelu& a, const GeluPart& part, const GeluMeeting& meeting, int,
                                              bool more) {
    const uint4 bias = part.load_bias<T>(a, 0);
    meeting.wait_for_sums();
    a.slope ? units<true>(a, part, bias) : units<false>(a, part, bias);
    if (more) meeting.tell_room();
  }

 private:
  template <bool kSlope>
  static __device__ __forceinline__ void units(const LinearGelu& a, const GeluPart& part, uint4 next) {
#pragma unroll 1
    for (int unit = 0; unit < part.units; ++unit) {
      float bias[8];
      unpack<T>(next, bias);
      next = part.load_bias<T>(a, unit + 1);
      uint4 given[kGeluLines];
#pragma unroll
      for (int i = 0; i < kGeluLines; ++i) given[i] = part.load(unit, i);
#pragma unroll
      for (int i = 0; i < kGeluLines; ++i) {
        float z[8], y[8], slope[8];
        unpack<T>(given[i], z);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 both = kSlope ? Activation::both(z[j] + bias[j]) : make_float2(Activation::value(z[j] + bias[j]), 0.f);
          y[j] = both.x, slope[j] = both.y;
        }
        if (!part.inside(unit, i)) continue;
        const int64_t offset = part.offset(unit, i);
        if constexpr (kSlope) *reinterpret_cast<uint4*>(static_cast<T*>(a.slope) + offset) = pack<T>(slope);
        *reinterpret_cast<uint4*>(static_cast<T*>(a.out) + offset) = pack<T>(y);
      }
    }
  }
};

// Two products, each rounded as if it were made in fp32.
template <class T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  uint32_t product;
  if constexpr (std::is_same_v<T, __half>) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  } else {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  }
  return product;
}

template <class T, bool kTurned>
struct LinearGeluBackward {
  using Given = LinearGelu;
  static constexpr bool kTurnLeft = false, kTurnRight = !kTurned;

  static __device__ __forceinline__ void load(const LinearGelu& a, const GeluPart& part, int unit, uint4 (&slope)[kGeluLines]) {
#pragma unroll
    for (int i = 0; i < kGeluLines; ++i) {
      slope[i] = make_uint4(0u, 0u, 0u, 0u);
      if (unit < part.units && part.inside(unit, i)) {
        slope[i] = __ldcs(reinterpret_cast<const uint4*>(static_cast<const T*>(a.slope) + part.offset(unit, i)));
      }
    }
  }

  // The sums of 8 columns over the lanes that have them; each lane stores two.
  static __device__ __forceinline__ void store_sums(const float (&total)[8], float* to) {
    const int lane = int(threadIdx.x) % kWarp;
    const bool upper = lane & 16, second = lane & 8;
    float four[4], two[2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      four[j] = (upper ? total[4 + j] : total[j]) + __shfl_xor_sync(kAllLanes, upper ? total[j] : total[4 + j], 16);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      two[j] = (second ? four[2 + j] : four[j]) + __shfl_xor_sync(kAllLanes, second ? four[j] : four[2 + j], 8);
    }
    *reinterpret_cast<float2*>(to + lane % 8 * 8 + upper * 4 + second * 2) = make_float2(two[0], two[1]);
  }

  static __device__ __forceinline__ void work(const LinearGelu& a, const GeluPart& part, const GeluMeeting& meeting, int turn,
                                              bool more) {
    __shared__ float shared[2][2][kGeluGroups][kHeadWide];  // of halves, in turn
    auto& sums = shared[meeting.half][turn];
    uint4 next[kGeluLines];
    load(a, part, 0, next);
    meeting.wait_for_sums();
#pragma unroll 1
    for (int unit = 0; unit < part.units; ++unit) {
      float total[8] = {};
      uint4 slopes[kGeluLines], given[kGeluLines];
#pragma unroll
      for (int i = 0; i < kGeluLines; ++i) slopes[i] = next[i], given[i] = part.load(unit, i);
      load(a, part, unit + 1, next);
#pragma unroll
      for (int i = 0; i < kGeluLines; ++i) {
        const uint4 product = {multiply_pairs<T>(given[i].x, slopes[i].x), multiply_pairs<T>(given[i].y, slopes[i].y),
                               multiply_pairs<T>(given[i].z, slopes[i].z), multiply_pairs<T>(given[i].w, slopes[i].w)};
        if (part.inside(unit, i)) *reinterpret_cast<uint4*>(static_cast<T*>(a.out) + part.offset(unit, i)) = product;
        float wide[8];
        unpack<T>(product, wide);
#pragma unroll
        for (int j = 0; j < 8; ++j) total[j] += wide[j];
      }
      if (a.sums) store_sums(total, &sums[part.group(unit)][64 * part.panel(unit)]);
    }
    if (more) meeting.tell_room();
    if (!a.sums) return;
    // The groups' sums meet, in a fixed order. What is read here is written again two tiles later, after the next meeting.
    meeting.takers_meet();
    if (part.row >= a.m) return;
    for (int c = int(threadIdx.x) % 128; c < kHeadWide && part.column + c < a.n; c += meeting.threads - 128) {
      a.sums[int64_t(part.row / kGeluRows) * a.n + part.column + c] = (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]);
    }
  }
};

template <class T, class Work>
__global__ void __launch_bounds__(kGeluThreads, 1) linear_gelu_kernel(const __grid_constant__ LinearGelu a) {
#if FUSELINE_HAS_WGMMA
  extern __shared__ char raw[];
  const uint32_t base = (shared_address(raw) + 1023) / 1024 * 1024, panels = base + kGeluStages * kHeadStageBytes;
  uint64_t* const full = reinterpret_cast<uint64_t*>(raw + (panels - shared_address(raw)) + 2 * kGeluSumsBytes);
  uint64_t* const empty = full + kGeluStages;
  const int rank = int(blockIdx.x) % kHeadCluster, first = int(blockIdx.x) / kHeadCluster;
  const int clusters = int(gridDim.x) / kHeadCluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kGeluStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], 8 * kHeadCluster);  // warps that multiply
    }
    publish_barriers();
  }
  cluster_arrive(), cluster_wait();
  __syncthreads();
  const int warpgroup = int(threadIdx.x) / 128;
  if (warpgroup < 2) {
    take_registers<kGeluMultiplier>();
    const GeluMeeting meeting(warpgroup);
    HeadProducts<T, Work, kGeluStages> products{base, warpgroup, full, empty};
    float sums[24][4];
    for (int item = first; item < a.items; item += clusters) {
      products.step(sums, true);
#pragma unroll 1
      for (int s = 1; s < a.steps; ++s) products.step(sums, false);
      products.end();
      hold(sums);
      meeting.wait_for_room();
      store_gelu_sums<T>(panels + warpgroup * kGeluSumsBytes, sums);
      meeting.tell_sums();
    }
  } else {
    give_registers<kGeluWorker>();
    if (threadIdx.x / kWarp < kGeluThreads / kWarp - 1) {
      const int half = warpgroup - 2;
      const GeluMeeting meeting(half);
      if (first < a.items) meeting.tell_room();
      for (int item = first, turn = 0; item < a.items; item += clusters, turn ^= 1) {
        const HeadPlace place = head_place(item, a.row_blocks, a.tiles, a.group);
        const GeluPart part(a, place, rank, half, panels + half * kGeluSumsBytes);
        Work::work(a, part, meeting, turn, item + clusters < a.items);
      }
    } else if (threadIdx.x % kWarp == 0) {
      fetch_tensor_map(&a.left), fetch_tensor_map(&a.right);
      HeadSlot<kGeluStages> at;
      for (int item = first; item < a.items; item += clusters) {
        const HeadPlace place = head_place(item, a.row_blocks, a.tiles, a.group);
        const int row = (place.block * kHeadCluster + rank) * kHeadRows;
#pragma unroll 1
        for (int s = 0; s < a.steps; ++s) {
          barrier_wait(&empty[at.slot], at.parity ^ 1);
          barrier_expect(&full[at.slot], kHeadStageBytes);
          copy_head_step<Work>(a, base + at.slot * kHeadStageBytes, &full[at.slot], s * kHeadStep, row,
                               place.tile * kHeadWide, rank);
          at.advance();
        }
      }
    }
  }
  cluster_arrive(), cluster_wait();  // no block goes while another may reach into it
#endif
}

// ---- launcher ----

template <class T, class Work>
cudaError_t resident_linear_gelu(const Device& device, int& clusters) {
  return resident_clusters(linear_gelu_kernel<T, Work>, device, kGeluThreads, size_t(kGeluShared), kHeadCluster, clusters);
}

template <class T, class Work>
int run_linear_gelu(LinearGelu& a, const void* left, const void* right, int64_t k, int dtype, void* stream) {
  Device device;
  const cudaError_t found = current_device(device);
  if (found != cudaSuccess) return int(found);
  int resident = 0;
  const cudaError_t asked = resident_linear_gelu<T, Work>(device, resident);
  if (asked != cudaSuccess) return int(asked);
  if (resident == 0) return FUSELINE_UNSUPPORTED;
  const int error = head_operands<Work>(a, left, right, a.m, a.n, k, dtype, 1, a.n);
  if (error != 0) return error;
  return launch(linear_gelu_kernel<T, Work>, a, int64_t(std::min(resident, a.items)) * kHeadCluster, dim3(kGeluThreads),
                size_t(kGeluShared), kHeadCluster, stream);
}

}  // namespace fuseline
