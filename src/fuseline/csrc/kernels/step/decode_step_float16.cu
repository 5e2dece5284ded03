// A whole decoding step of fp16 weights. See step/step_kernel.cuh.

#include "step_kernel.cuh"

namespace fuseline {

template int launch_step<__half>(const StepArguments&, const StepPlan&, void*);

}  // namespace fuseline
