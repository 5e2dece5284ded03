// From the sums of the blocks of linear_tiles.cuh to y: by who has a tile's beginning, or by all blocks of a cluster.
#pragma once

#include "linear_tiles_work.cuh"
#include "device/meeting.cuh"

namespace fuseline {

// The warpgroups that multiply, without the one that brings x.
template <int kMultipliers>
__device__ __forceinline__ void meet_multipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kMultipliers) : "memory");
}

// The sums of a tile of other blocks, that begin where this one ends, are added to this block's, or this block's left for
// who has the tile's beginning. Answers whether the sums are whole.
template <class Shape, int kTiles, int kSums>
__device__ __forceinline__ bool gather(const LinearArguments& a, float (&sums)[kTiles][kSums], int begin, int end) {
  constexpr int kPlane = kTiles * kSums / 4 * Shape::kMultipliers;  // float4 of a block
  const int place = place_of_block();
  float4* const planes = reinterpret_cast<float4*>(a.partials) + threadIdx.x;
  if (begin > 0) {
    float4* const to = planes + int64_t(place) * kPlane;
#pragma unroll
    for (int i = 0; i < kTiles * kSums / 4; ++i) {
      const float* const four = &sums[i / (kSums / 4)][i % (kSums / 4) * 4];
      __stcg(to + i * Shape::kMultipliers, make_float4(four[0], four[1], four[2], four[3]));
    }
    __threadfence();
    meet_multipliers<Shape::kMultipliers>();
    if (threadIdx.x == 0) {
      asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(a.flags + place), "l"(a.token) : "memory");
    }
    return false;
  }
  if (end == a.steps) return true;
  int last = place;
  while (end < a.steps) {
    const Run run(a, ++last);
    end += run.end - run.first;
  }
  for (int other = place + 1 + int(threadIdx.x); other <= last; other += Shape::kMultipliers) {  // all at once
    uint64_t* const flag = a.flags + other;
    uint64_t there = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(there) : "l"(flag) : "memory");
    } while (there != a.token);
    *flag = 0;  // a graph may launch this again, with the same token
  }
  meet_multipliers<Shape::kMultipliers>();
#pragma unroll 1
  for (int other = place + 1; other <= last; ++other) {
    const float4* const from = planes + int64_t(other) * kPlane;
#pragma unroll
    for (int i = 0; i < kTiles * kSums / 4; ++i) {
      float* const four = &sums[i / (kSums / 4)][i % (kSums / 4) * 4];
      const float4 more = __ldcg(from + i * Shape::kMultipliers);
      four[0] += more.x, four[1] += more.y, four[2] += more.z, four[3] += more.w;
    }
  }
  return true;
}

// What stands around the sums of a lane's rows of W, g and g + 8 of a tile.
template <class T, class Weights>
struct AroundSums {
  float scale[2], shift[2];
  int first;  // row of W

  // Scale and shift of both rows at hand.
  __device__ __forceinline__ AroundSums(float2 one, float2 other, int row)
      : scale{one.x, other.x}, shift{one.y, other.y}, first(row) {}
  __device__ __forceinline__ AroundSums(const LinearArguments& a, int tile)
      : first(tile * kTileRows + int(threadIdx.x) % kWarp / 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool there = first + 8 * i < a.n;
      scale[i] = !Weights::kGrouped && there ? __uint_as_float(__ldg(a.scales + first + 8 * i)) : 1.f;
      shift[i] = a.bias && there ? to_float(reinterpret_cast<const T*>(a.bias)[first + 8 * i]) : 0.f;
    }
  }

  // Whole sums of eight rows of x from `first_row` on to y: lanes of neighbouring rows of W trade, so that each has two
  // neighbours of one row of x.
  __device__ __forceinline__ void write(const LinearArguments& a, const float* sums, int first_row) const {
    const int lane = threadIdx.x % kWarp, odd = lane / 4 & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float one = fmaf(sums[2 * i], scale[i], shift[i]), two = fmaf(sums[2 * i + 1], scale[i], shift[i]);
      const float other = __shfl_xor_sync(~0u, odd ? one : two, 4);
      const float low = odd ? other : one, high = odd ? two : other;
      const int row = first_row + lane % 4 * 2 + odd, feature = first - odd + 8 * i;
      if (row >= a.m || feature >= a.n) continue;
      T* const y = reinterpret_cast<T*>(a.y) + int64_t(row) * a.n + feature;
      if (a.y_pairs) {
        *reinterpret_cast<uint32_t*>(y) = pack_pair<T>(low, high);
      } else {
        y[0] = from_float<T>(low);
        if (feature + 1 < a.n) y[1] = from_float<T>(high);
      }
    }
  }
};

// Where the blocks of a cluster share a tile: each has its sums stand where x was, [four of them][thread], and adds and
// writes those of every so many-th eight rows of x.
template <class T, class Weights, class Shape, int kRows, int kTiles, int kSums>
__device__ __forceinline__ void add_in_cluster(const LinearArguments& a, const float (&sums)[kTiles][kSums], float4* ring,
                                               int row_blocks) {
  float4* const plane = ring + threadIdx.x;
  meet_multipliers<Shape::kMultipliers>();  // nobody reads x any more
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const float* const four = &sums[t][4 * i];
      plane[(t * (kSums / 4) + i) * Shape::kMultipliers] = make_float4(four[0], four[1], four[2], four[3]);
    }
  }
  cluster_arrive();
  cluster_wait();
  const int tile = int(blockIdx.x) / a.splits, rank = int(blockIdx.x) - tile * a.splits;
  const int first_row = tile % row_blocks * kRows;
#pragma unroll 1
  for (int t = 0; t < kTiles; ++t) {
    const AroundSums<T, Weights> around(a, Shape::tile_of(tile / row_blocks, t));
#pragma unroll 1
    for (int i = rank; i < kSums / 4; i += a.splits) {
      float4 parts[kMostSplits];
#pragma unroll
      for (int s = 0; s < kMostSplits; ++s) {  // each begins with its own: nobody is asked by all at once
        if (s >= a.splits) break;
        const int from = rank + s < a.splits ? rank + s : rank + s - a.splits;
        parts[s] = load_four_in_cluster(&plane[(t * (kSums / 4) + i) * Shape::kMultipliers].x, from);
      }
      float four[4] = {};
#pragma unroll
      for (int s = 0; s < kMostSplits; ++s) {
        if (s >= a.splits) break;
        four[0] += parts[s].x, four[1] += parts[s].y, four[2] += parts[s].z, four[3] += parts[s].w;
      }
      around.write(a, four, first_row + i * 8);
    }
  }
  cluster_arrive();  // nobody leaves while others read here
  cluster_wait();
}

}  // namespace fuseline
