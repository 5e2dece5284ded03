// The two launches of the small attention layer by products of warpgroups: in 16 bits, and in fp32 with its products in TF32.
//
// us in a graph at 8 x (128, 512) in bf16 and TF32: products of warps 17.9 and 30.7, of warpgroups 14.4 and 24.8; where
// blocks of a cluster fetch for each other (multicast) 14.7 and 29.0. At 8 x (64, 256): 8.3, 7.7, 7.4 and 11.9, 10.1, 9.6.
// Of the first's 20,000 cycles the products take 7,000, sending q, k and v 2,600, attending 3,100 and what keys are shared
// for 2,200: straight code that runs once.

#include "small_layer_by_warpgroups.h"
#include "small_layer_heads.cuh"
#include "small_layer_out.cuh"

namespace fuseline {

template <class Math>
int launch_heads_by_warpgroups(const fuseline_small_layer& layer, const SmallLayerPlan& plan, const Device& device, void* stream) {
  return plan.launches[0].tiles.rows == 64 ? launch_heads<Math, 64, 2, true>(layer, plan, device, stream)
                                           : launch_heads<Math, 128, 2, true>(layer, plan, device, stream);
}

template <class Math>
int launch_out_by_warpgroups(const fuseline_small_layer& layer, const SmallLayerPlan& plan, const Device& device, void* stream) {
  constexpr const ChunkTiles& kTiles = kOutByWarpgroups;
  return launch_out<WarpgroupProduct<Math, kTiles.rows, kTiles.columns, kTiles.splits>, kTiles>(layer, plan, device, stream);
}

template <class Math>
int heads_resident(const SmallLayerLaunch& by, const Device& device) {
  const auto kernel = by.tiles.rows == 64 ? small_layer_heads<Math, 64, 2, true> : small_layer_heads<Math, 128, 2, true>;
  int count = 0;
  const LaunchShape& shape = by.shape;
  return resident_clusters(kernel, device, shape.threads, shape.shared, shape.cluster, count) == cudaSuccess ? count : 0;
}

#define FUSELINE_BY_WARPGROUPS(Math)                                                                                         \
  template int launch_heads_by_warpgroups<Math>(const fuseline_small_layer&, const SmallLayerPlan&, const Device&, void*);   \
  template int launch_out_by_warpgroups<Math>(const fuseline_small_layer&, const SmallLayerPlan&, const Device&, void*);     \
  template int heads_resident<Math>(const SmallLayerLaunch&, const Device&);

FUSELINE_BY_WARPGROUPS(Sixteen<__nv_bfloat16>)
FUSELINE_BY_WARPGROUPS(Tf32)

}  // namespace fuseline
