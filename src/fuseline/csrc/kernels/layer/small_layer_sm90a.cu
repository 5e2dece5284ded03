// The small attention layer on Hopper (small_layer_wgmma.cuh): in 16 bits, and in fp32 with its products in TF32.

#include "small_layer_wgmma.cuh"

namespace fuseline {

template int heads_by_warpgroups<Sixteen<__nv_bfloat16>>(const fuseline_small_layer&, const Device&, void*);
template int out_by_warpgroups<Sixteen<__nv_bfloat16>>(const fuseline_small_layer&, const Device&, void*);
template int heads_by_warpgroups<Tf32>(const fuseline_small_layer&, const Device&, void*);
template int out_by_warpgroups<Tf32>(const fuseline_small_layer&, const Device&, void*);

}  // namespace fuseline
