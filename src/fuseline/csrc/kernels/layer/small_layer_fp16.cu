// The small attention layer in fp16.

#include "small_layer_backward.cuh"
#include "small_layer_route.cuh"

namespace fuseline {

template int run_forward<Sixteen<__half>>(const fuseline_small_layer&, const Device&, bool, void*);
template int run_backward<Sixteen<__half>>(const fuseline_small_layer&, const fuseline_small_layer_gradients*, const Device&, bool,
                         void*);

}  // namespace fuseline
