// The small attention layer in fp32 with its products in TF32, on Hopper (layer/small_layer_wgmma.cuh).

#include "small_layer_wgmma.cuh"

namespace fuseline {

template int heads_by_warpgroups<Tf32>(const fuseline_small_layer&, const Device&, void*);
template int out_by_warpgroups<Tf32>(const fuseline_small_layer&, const Device&, void*);

}  // namespace fuseline
