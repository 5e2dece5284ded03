// The C API of the small attention layer forward, which launches what the plan says, and what is asked of plans.

#include "small_layer_by_warpgroups.h"
#include "small_layer_forward.cuh"
#include "small_layer_heads.cuh"
#include "small_layer_out.cuh"

namespace fuseline {
namespace {

bool is_being_captured(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return status == cudaStreamCaptureStatusActive;
}

SmallLayerPlan plan_on(const Device& device, const fuseline_small_layer& layer, void* stream) {
  const auto captured = [&] { return is_being_captured(stream); };
  const auto residents = [&](const SmallLayerLaunch& by) {
    return layer.dtype == FUSELINE_BFLOAT16 ? heads_resident<Sixteen<__nv_bfloat16>>(by, device) : heads_resident<Tf32>(by, device);
  };
  return plan_small_layer_forward(layer, device, captured, residents);
}

template <class Math>
int launch(const fuseline_small_layer& layer, const SmallLayerLaunch& by, const SmallLayerPlan& plan, const Device& device,
           void* stream) {
  if constexpr (!std::is_same_v<Math, Exact>) {
    if (by.tiles.warpgroups) {
      return by.kernel == SmallLayerKernel::heads ? launch_heads_by_warpgroups<Math>(layer, plan, device, stream)
                                                  : launch_out_by_warpgroups<Math>(layer, plan, device, stream);
    }
  }
  return by.kernel == SmallLayerKernel::heads ? launch_heads<Math>(layer, plan, device, stream)
         : by.kernel == SmallLayerKernel::out ? launch_out<Math>(layer, plan, device, stream)
                                              : launch_forward<Math>(layer, plan, device, stream);
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int fuseline_small_layer_fits(const fuseline_small_layer* layer, int backward) {
  Device device;
  if (current_device(device) != cudaSuccess) return 0;
  const auto captured = [] { return false; };
  if (plan_small_layer_forward(*layer, device, captured, EstimatedSmallLayers{device}).count == 0) return 0;
  return !backward || plan_small_layer_backward(*layer, {}, device).count > 0;
}

int fuseline_small_layer_forward(const fuseline_small_layer* layer, void* stream) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const SmallLayerPlan plan = plan_on(device, *layer, stream);
  if (plan.count == 0) return plan.code;
  return with_math(*layer, [&](auto math) {
    int code = 0;
    for (const SmallLayerLaunch& by : plan) code = code != 0 ? code : launch<decltype(math)>(*layer, by, plan, device, stream);
    return code;
  });
}

int fuseline_small_layer_explain(const fuseline_small_layer* layer, const fuseline_small_layer_gradients* gradients, void* stream,
                                 fuseline_attention_plan* plan) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const SmallLayerPlan found =
      gradients ? plan_small_layer_backward(*layer, *gradients, device) : plan_on(device, *layer, stream);
  *plan = {found.code, found.reason, found.workspace, found.count};
  for (int i = 0; i < found.count; ++i) {
    const SmallLayerLaunch& by = found.launches[i];
    plan->launches[i] = {name_of(by.kernel), by.shape.grid, by.shape.threads, by.shape.shared};
  }
  return 0;
}

int fuseline_is_captured(void* stream) { return is_being_captured(stream); }
