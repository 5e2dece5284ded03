// The launchers of small_layer_wgmma.h.
//
// us in a graph at 8 x (128, 512) in bf16 and TF32: products of warps 17.9 and 30.7, of warpgroups 14.4 and 24.8; where
// blocks of a cluster fetch for each other (multicast) 14.7 and 29.0. At 8 x (64, 256): 8.3, 7.7, 7.4 and 11.9, 10.1, 9.6.
// Of the first's 20,000 cycles the products take 7,000, sending q, k and v 2,600, attending 3,100 and what keys are shared
// for 2,200: straight code that runs once.
#pragma once

#include "small_layer_heads.cuh"
#include "small_layer_out.cuh"
#include "small_layer_wgmma.h"
#include "warpgroup_product.cuh"

namespace fuseline {

template <class Math>
int heads_by_warpgroups(const fuseline_small_layer& layer, const Device& device, void* stream) {
  if (layer.seqlen <= 64) return launch_heads_forward<Math, 64, 2, true>(layer, device, stream);
  return launch_heads_forward<Math, 128, 2, true>(layer, device, stream);
}

template <class Math>
int out_by_warpgroups(const fuseline_small_layer& layer, const Device& device, void* stream) {
  return launch_out<WarpgroupProduct<Math, 64, 64, 2>>(layer, device, stream);
}

}  // namespace fuseline
