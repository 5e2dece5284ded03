// The small attention layer in exact fp32.

#include "small_layer_backward.cuh"
#include "small_layer_route.cuh"

namespace fuseline {

template int run_forward<Exact>(const fuseline_small_layer&, const Device&, bool, void*);
template int run_backward<Exact>(const fuseline_small_layer&, const fuseline_small_layer_gradients*, const Device&, bool,
                         void*);

}  // namespace fuseline
