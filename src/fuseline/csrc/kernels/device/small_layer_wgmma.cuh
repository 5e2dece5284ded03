// The launchers of small_layer_wgmma.h.
//
// At 8 x (128, 512) in bf16 a multiprocessor takes 224 KB for its heads and 128 KB for its tile of the output, which L2
// gives at 50 bytes a nanosecond and multiprocessor: blocks of a cluster that fetch for each other take half.
#pragma once

#include "small_layer_heads.cuh"
#include "small_layer_out.cuh"
#include "small_layer_wgmma.h"
#include "warpgroup_product.cuh"

namespace fuseline {

template <class Math>
int heads_by_warpgroups(const fuseline_small_layer& layer, const Device& device, void* stream) {
  if (layer.seqlen <= 64) return launch_heads_forward<Math, 64, 2, true>(layer, device, stream, 2);
  return launch_heads_forward<Math, 128, 2, true>(layer, device, stream, 2);
}

template <class Math>
int out_by_warpgroups(const fuseline_small_layer& layer, const Device& device, void* stream) {
  return launch_out<WarpgroupProduct<Math, 64, 64, 2>>(layer, device, stream, true);
}

}  // namespace fuseline
