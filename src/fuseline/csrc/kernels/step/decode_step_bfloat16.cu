// A whole decoding step of bf16 weights. See step/step_kernel.cuh.

#include "step_kernel.cuh"

namespace fuseline {

template int launch_step<__nv_bfloat16>(const StepArguments&, const StepPlan&, void*);

}  // namespace fuseline
