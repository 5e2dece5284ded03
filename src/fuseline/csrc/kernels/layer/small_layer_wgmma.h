// The small attention layer's forward in two launches by products of warpgroups (warpgroup_product.cuh), as
// small_layer_route.cuh asks for it.
#pragma once

#include "small_layer.cuh"

namespace fuseline {

// small_layer_sm90a.cu has them. Heads: of more than 32 rows; out: in tiles of 64 x 64.
// FUSELINE_UNSUPPORTED where they do not fit.
template <class Math>
int heads_by_warpgroups(const fuseline_small_layer& layer, const Device& device, void* stream);
template <class Math>
int out_by_warpgroups(const fuseline_small_layer& layer, const Device& device, void* stream);

}  // namespace fuseline
