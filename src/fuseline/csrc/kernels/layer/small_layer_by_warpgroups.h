// The small attention layer's forward in two launches by products of warpgroups (warpgroup_product.cuh).
#pragma once

#include "small_layer.cuh"

namespace fuseline {

// small_layer_sm90a.cu has them: heads of more than 32 rows, the output projection, and how many clusters of these heads the
// device holds at once.
template <class Math>
int launch_heads_by_warpgroups(const fuseline_small_layer& layer, const SmallLayerPlan& plan, const Device& device, void* stream);
template <class Math>
int launch_out_by_warpgroups(const fuseline_small_layer& layer, const SmallLayerPlan& plan, const Device& device, void* stream);
template <class Math>
int heads_resident(const SmallLayerLaunch& by, const Device& device);

}  // namespace fuseline
