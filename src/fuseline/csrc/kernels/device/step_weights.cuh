// A whole decoding step (step_kernel.cuh): weights on their way from HBM, and their products with what is in shared memory.
#pragma once

#include "mma.cuh"
#include "quant_copies.cuh"
#include "step_plan.cuh"
#include "vector.cuh"

namespace fuseline {

// Shared memory of the launch: the ring, units, layers, and what StepShape::lay_out says.
__device__ __forceinline__ char* step_shared() {
  extern __shared__ __align__(16) char shared[];
  return shared;
}

template <class Shape>
__device__ __forceinline__ StepUnit* units_of(int product) {
  return reinterpret_cast<StepUnit*>(step_shared() + Shape::kRingBytes) + product * Shape::kWarps;
}

template <class Shape>
__device__ __forceinline__ StepLayer* step_layers() {
  return reinterpret_cast<StepLayer*>(step_shared() + Shape::kRingBytes + Shape::kUnitBytes);
}

// For each product and warp; to be waited for.
template <class Shape>
__device__ __forceinline__ void lay_out_units(const StepArguments& a) {
  const int thread = threadIdx.x, grid = int(gridDim.x), block = int(blockIdx.x);
  if (thread >= kStepProducts * Shape::kWarps) return;
  const int index = thread / Shape::kWarps, warp = thread % Shape::kWarps;
  const StepProduct of = a.products[index];
  StepUnit u{};
  u.together = Shape::kWarps / of.spread, u.group = warp / of.spread;
  const int first = warp % of.spread;
  u.spread = of.spread, u.first = first;
  u.mine = (of.rows - block + grid - 1) / grid;
  u.rows = u.group < u.together ? max(0, (u.mine - u.group + u.together - 1) / u.together) : 0;
  u.offset = (uint32_t(block + grid * u.group) * uint32_t(of.k) + uint32_t(first * Shape::kPiece)) * 2u;
  u.stride = uint32_t(grid * u.together) * uint32_t(of.k) * 2u;
  u.columns = of.k - first * Shape::kPiece;
  u.pieces = of.spread == 1 ? of.pieces : 1;
  u.part_bytes = of.parts == 2 ? uint32_t(of.rows) * uint32_t(of.k) * 2u : 0;
  units_of<Shape>(index)[warp] = u;
}

// Of each run of so many lanes, a power of two.
__device__ __forceinline__ float sum_of_lanes(float value, int lanes) {
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// The sum of a piece, or of several, of what lanes have of it: that of four lanes is with the one that holds row g, column g.
__device__ __forceinline__ float sum_of_shares(float share) {
  const int row = threadIdx.x % 8;
  return sum_of_lanes(__shfl_sync(~0u, share, row * 4 + row / 2), 8);
}

// The pieces that this warp multiplies, in its order, copied `kDepth` ahead.
template <class Shape>
class Weights {
 public:
  __device__ __forceinline__ explicit Weights(const StepArguments& a_) : a(a_) {
    const int warp = threadIdx.x / kWarp;
    mine = uint32_t(__cvta_generic_to_shared(step_shared())) + warp * Shape::kDepth * Shape::kSlotBytes + threadIdx.x % kWarp * 16;
    index = -1, layer = 0, slot = 0, rows = 0;
    begin_product();
#pragma unroll 1
    for (int d = 0; d < Shape::kDepth; ++d) go_on();
  }

  // What this lane has of the next piece times `x`, the elements that it goes with: `sum_of_shares` adds up.
  //
  // By the tensor cores, since instructions are what a step waits for. Of four lanes' vectors of weights the even words are
  // row g of a matrix and the odd ones row g + 8; of their vectors of x, which lie `mixed`, the even words are column g of
  // one matrix and the odd ones that of another. What rows g and g + 8 have with column g is wanted, all else is not.
  __device__ __forceinline__ float product(const typename Shape::Element* x) const {
    using T = typename Shape::Element;
    wait_for_copies<Shape::kDepth - 1>();
    const uint4* const vectors = reinterpret_cast<const uint4*>(x) + threadIdx.x % kWarp;
    float even[4] = {}, odd[4] = {};
    __syncwarp();
#pragma unroll
    for (int v = 0; v < Shape::kVectors; ++v) {
      const uint4 w = load_shared(mine + slot * Shape::kSlotBytes + v * 512), with = vectors[v * kWarp];
      mma_16816<T>(even, {w.x, w.y, w.z, w.w}, with.x, with.y);
      mma_16816<T>(odd, {w.x, w.y, w.z, w.w}, with.z, with.w);
    }
    return threadIdx.x / 4 % 2 ? even[1] + odd[3] : even[0] + odd[2];
  }

  // The place of the piece that was multiplied goes to another.
  __device__ __forceinline__ void go_on() {
    if (rows > 0) {
      const int columns = unit().columns - piece * Shape::kPiece;
#pragma unroll
      for (int v = 0; v < Shape::kVectors; ++v) {
        const int column = (v * kWarp + int(threadIdx.x) % kWarp) * 8;
        const bool there = column < columns;
        copy_async(mine + slot * Shape::kSlotBytes + v * 512, there ? at + column * 2 : at, there ? 16 : 0);
      }
      advance();
    }
    commit_copies();
    slot = slot + 1 == Shape::kDepth ? 0 : slot + 1;
  }

 private:
  const StepArguments& a;
  const char* at;
  uint32_t mine;
  int layer, index, rows, slot;
  int piece, part;

  __device__ __forceinline__ const StepUnit& unit() const { return units_of<Shape>(index)[threadIdx.x / kWarp]; }

  __device__ __forceinline__ void begin_product() {
    while (index < kHead) {
      if (++index == kHead && ++layer < a.num_layers) index = 0;
      rows = unit().rows, piece = 0, part = 0;
      if (rows == 0) continue;
      at = (index == kHead ? a.head_weight : step_layers<Shape>()[layer].weights[index]) + unit().offset;
      return;
    }
    rows = 0;
  }

  __device__ __forceinline__ void advance() {
    if (++piece < unit().pieces) {
      at += Shape::kPiece * 2;
      return;
    }
    at -= (piece - 1) * Shape::kPiece * 2, piece = 0;
    if (unit().part_bytes && part == 0) {
      at += unit().part_bytes, part = 1;
      return;
    }
    if (part) at -= unit().part_bytes, part = 0;
    at += unit().stride;
    if (--rows == 0) begin_product();
  }
};

}  // namespace fuseline
