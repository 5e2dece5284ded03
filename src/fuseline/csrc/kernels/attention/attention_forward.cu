// The C API of attention forward: launches what the plan says.

#include "attention_launches.h"
#include "device/attention_launch.cuh"

namespace fuseline {

template <class T>
int launch_forward(const Attention& a, const AttentionLaunch& by, void* stream);
// The same by products of warpgroups, in 16 bits.
template <class T>
int launch_forward_panels(const Attention& a, const AttentionLaunch& by, void* stream);

}  // namespace fuseline

using namespace fuseline;

size_t fuseline_attention_forward_workspace(const fuseline_attention* call) {
  Device device;
  return current_device(device) == cudaSuccess ? plan_attention_forward(*call, device).workspace : 0;
}

int fuseline_attention_forward(const fuseline_attention* call, void* stream) {
  const fuseline_attention& c = *call;
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const AttentionPlan plan = plan_attention_forward(c, device);
  if (plan.count == 0) return plan.code;
  const AttentionLaunch& by = plan.launches[0];
  if (plan.form.length > 0) return launch_short_forward(c, plan, stream);
  Attention a = attention_of(c);
  if (by.kernel == AttentionKernel::split) return launch_split(a, plan, stream);
  a.mask_tile = by.mask_tile;
  return with_dtype(c.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, float>) {
      if (by.kernel == AttentionKernel::forward_panels) return launch_forward_panels<T>(a, by, stream);
    }
    return launch_forward<T>(a, by, stream);
  });
}
