// The C API of the small attention layer backward: launches what the plan says.

#include "small_layer_backward.cuh"

int fuseline_small_layer_backward(const fuseline_small_layer* layer, const fuseline_small_layer_gradients* gradients,
                                  void* stream) {
  using namespace fuseline;
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const SmallLayerPlan plan = plan_small_layer_backward(*layer, *gradients, device);
  if (plan.count == 0) return plan.code;
  return with_math(*layer, [&](auto math) { return launch_backward<decltype(math)>(*layer, *gradients, plan, device, stream); });
}
