// A whole decoding step (step_kernel.cuh): weights on their way from HBM, and their products with what is in shared memory.
#pragma once

#include "device/quant_copies.cuh"
#include "step_arguments.cuh"
#include "device/vector.cuh"

namespace fuseline {

// Shared memory of the launch: the ring, units, layers, and what StepLayout says.
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

  // This lane's share of the next piece times `x`, the elements that it goes with.
  __device__ __forceinline__ float product(const typename Shape::Element* x) const {
    using T = typename Shape::Element;
    wait_for_copies<Shape::kDepth - 1>();
    const uint4* const vectors = reinterpret_cast<const uint4*>(x) + threadIdx.x % kWarp;
    float sums[2] = {};
#pragma unroll
    for (int v = 0; v < Shape::kVectors; ++v) {
      float w[8], values[8];
      unpack<T>(load_shared(mine + slot * Shape::kSlotBytes + v * 512), w);
      unpack<T>(vectors[v * kWarp], values);
#pragma unroll
      for (int e = 0; e < 8; ++e) sums[e % 2] = fmaf(w[e], values[e], sums[e % 2]);
    }
    return sums[0] + sums[1];
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
